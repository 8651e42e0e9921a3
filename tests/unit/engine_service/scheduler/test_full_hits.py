"""Logits that another client stored behind a prompt do not surprise this engine, which samples from a pass of its own."""

import numpy as np

from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, make_request


def test_a_token_is_left_to_compute_where_a_full_hit_could_be_had() -> None:
    world = World(block_size=2, make_cache=CoreCache)
    prompt = [1, 2, 0, 1]
    world.submit(make_request(prompt, 2))
    world.run()
    index = world.cache.manager.state.index
    nodes = index.match(index.find_root(""), np.array(prompt, np.int32), 2)
    index.logits.max_bytes = 4
    index.logits.put(int(nodes[-1]), b"\0\0\0\0")
    again = world.submit(make_request(prompt, 2))
    world.run()
    world.check_outputs()
    assert again.num_hit_tokens == 2
    stats = world.cache.manager.queries.stats()
    assert (stats.num_stored_logits, stats.num_full_hits) == (1, 0)
