"""The service is killed at any moment: what the next run believes of the kept index is what the memory holds.

The oracle is content. Whatever is restored is compared with the slots themselves; whatever an engine of the dead service may
still write is neither believed nor free; whatever may hold another tenant's tokens is cleared before its next use.
"""

import random

import numpy as np
import pytest

from kvkeeper.cache_service.core.calls.restore import EARLIER_RUN
from kvkeeper.cache_service.core.index.index_record import IndexRecord
from kvkeeper.cache_service.core.index.slot_table import SlotTable
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import UNKNOWN_ROOT, Executor
from tests.support.tiers.tier_world import TierWorld
from tests.support.worlds.kept_pool import KeptMemory, chains, write_all
from tests.support.worlds.moments import in_flight

NUM_SEEDS, NUM_EVENTS = 8, 120


def killed(seed: int) -> tuple[int, int, int]:
    """One seed. Answers blocks that were believed, blocks that engines still wrote, and kills with all written down."""
    rng = random.Random(seed)
    config = PoolConfig(
        num_blocks=rng.choice([6, 12, 24]),
        block_size=2,
        max_sequences=rng.choice([6, 10]),
        max_tokens_per_sequence=rng.choice([8, 16]),
        watermark=0.0,
        num_host_blocks=rng.choice([9, 33]),
    )
    world = TierWorld(config, alphabet=rng.choice([1, 2]), num_tenants=2, faults=rng.choice([6, 1000]))
    memory = KeptMemory(config)
    world.manager.restore(memory.kept, may_still_write=False)
    num_believed = num_written = num_whole = 0

    def choose(count: int) -> int:
        return int(rng.random() * count)

    for _ in range(NUM_EVENTS):
        event = choose(100)
        while len(world.engines) < 2:
            world.open(Executor.ENGINE)
        session = list(world.engines)[choose(2)]
        if event < 12 or not world.engines[session].sequences:
            world.create(session, choose)
        elif event < 14:
            world.close(session, may_still_write=bool(choose(2)))
        elif event < 20 and world.ended:
            (world.run_ended if choose(3) else world.end_quarantine)(world.ended[choose(len(world.ended))])
        elif event < 22:
            world.report(session, choose)
        elif event < 30:
            world.manager.write_record(1 + choose(4))
        elif event < 33:
            world.manager.publish_pending()
            write_all(world.manager)
            num_whole += check_whole(world, memory)
        else:
            world.step(session, choose)
        world.audit()
        if choose(2):
            believed, written = check_kill(world, memory)
            num_believed, num_written = num_believed + believed, num_written + written
    world.drain()
    return num_believed, num_written, num_whole


def check_kill(world: TierWorld, memory: KeptMemory) -> tuple[int, int]:
    """The service is killed now, its engines live. Answers the blocks that are believed, and those that may be written."""
    manager, result = memory.restored(may_still_write=True)
    assert not (wrong := manager.check_invariants()), wrong
    pool, found = manager.state.pool, chains(manager)
    assert result.num_blocks == len(found)
    for (tenant, tokens), block in found.items():
        spelled = world.contents.spell(tenant, list(tokens))[-world.config.block_size :]
        assert world.memory.device[block] == spelled, f"block {block} is believed and holds something else"
    writes: set[int] = set()
    for session in [*world.engines, *world.ended]:
        writes |= in_flight(world, session)[0]
    exposed = {block for block in writes if not pool.quarantine_counts[block] or pool.indexed[block]}
    assert not exposed, f"blocks {exposed} could be had, or are shared, while an engine writes them"
    check_residue(world, manager)
    manager.end_quarantine(EARLIER_RUN)
    assert not (wrong := manager.check_invariants()), wrong
    assert pool.num_available == pool.num_blocks - 1
    return len(found), len(writes)


def check_residue(world: TierWorld, manager: object) -> None:
    """What a block holds of another tenant is cleared before the block is used (R8)."""
    state = manager.state  # type: ignore[attr-defined]
    for block in range(1, state.pool.num_blocks):
        root = int(state.allocator.last_roots[block])
        for tenant, contents in world.written.items():
            if root != UNKNOWN_ROOT and state.index.find_root(tenant) != root:
                assert not contents.intersection(world.memory.device[block]), f"block {block} holds what {tenant!r} has written"
    assert state.index.num_roots >= sum(1 for contents in world.written.values() if contents)


def check_whole(world: TierWorld, memory: KeptMemory) -> int:
    """All that is published is written down: what is restored equals what was, as far as it lies on the device."""
    manager, _ = memory.restored()
    wanted = chains(world.manager, on_device=True)
    assert chains(manager) == wanted
    return len(wanted) > 0


def test_what_is_restored_after_a_kill_is_what_the_memory_holds() -> None:
    sums = np.zeros(3, np.int64)
    for seed in range(NUM_SEEDS):
        try:
            sums += killed(seed)
        except BaseException as error:
            error.add_note(f"kept index, seed {seed}")
            raise
    # The run counts only if what it is about has happened.
    assert (sums > (500, 500, 10)).all(), sums


def test_a_table_that_does_not_forget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that another sequence has now is still believed; the table's own audit is not asked."""
    monkeypatch.setattr(SlotTable, "forget", lambda self, blocks: None)
    monkeypatch.setattr(IndexRecord, "check", lambda self, node_of_block: iter(()))
    with pytest.raises(AssertionError, match=r"is believed and holds something else|are shared, while an engine writes"):
        list(map(killed, range(NUM_SEEDS)))
