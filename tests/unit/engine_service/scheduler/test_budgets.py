"""Budgets of a step: tokens, prompt tokens, and sequences that decode."""

import numpy as np
import pytest

from tests.support.worlds.scheduler_world import World, make_request


@pytest.mark.parametrize("prefill_budget", [1, 3, 7, 8])
def test_prompts_together_stay_within_their_budget_and_every_token_is_computed_once(prefill_budget: int) -> None:
    world = World(chunk_size=4, token_budget=16, prefill_budget=prefill_budget)
    for length in (9, 3, 4, 5, 1):
        world.submit(make_request([place % 3 for place in range(length)], 3, look_up=False))
    most = 0
    while world.busy:
        most = max(most, world.step().num_prompt_tokens)
    assert most == prefill_budget
    world.run()
    world.check_outputs()
    assert set(world.computed.values()) == {1}


def test_decodes_go_on_beside_prompts_that_fill_their_budget() -> None:
    world = World(chunk_size=4, token_budget=8, prefill_budget=4)
    world.submit(make_request([1, 2], 12))
    world.step()
    world.submit(make_request([2] * 12, 2))
    assert [world.step().num_new.tolist() for _ in range(3)] == [[1, 4]] * 3


@pytest.mark.parametrize("decode_budget", [1, 2, 3])
def test_more_sequences_than_may_decode_take_turns(decode_budget: int) -> None:
    world = World(decode_budget=decode_budget)
    requests = [world.submit(make_request([place % 3, place], 12, look_up=False)) for place in range(4)]
    world.step()
    while world.busy:
        work = world.step()
        assert len(work.rows) <= decode_budget
        counts = [request.num_new_tokens for request in requests]
        assert max(counts) - min(counts) <= 1
    world.run()
    world.check_outputs()


def test_what_is_forked_takes_turns_too() -> None:
    world = World(decode_budget=2, block_size=4)
    world.submit(make_request([1, 2, 0, 1, 2], 6, n=3))
    world.submit(make_request([2, 2], 6))
    world.run()
    world.check_outputs()
    assert np.max(list(world.computed.values())) == 1
