"""The service is killed at any moment: what the next run believes of the kept index is what the memory of both tiers holds.

The oracle is content. Whatever is restored is compared with the slots themselves; whatever an engine of the dead service may
still write is neither believed nor free; whatever may hold another tenant's tokens is cleared before its next use.
"""

import random

import numpy as np
import pytest

from kvkeeper.cache_service.core.calls.restore import EARLIER_RUN
from kvkeeper.cache_service.core.index.index_record import IndexRecord, SlotTable
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.kv_spec import ReadSpan, state_span
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import UNKNOWN_TENANT, Int32Array
from tests.support.reference.read_spans import make_spans
from tests.support.tiers.tier_events import act, any_session
from tests.support.tiers.tier_world import TierWorld
from tests.support.worlds.kept_pool import KeptMemory, chains, write_all
from tests.support.worlds.moments import in_flight

NUM_SEEDS, NUM_EVENTS = 8, 120


def killed(seed: int) -> tuple[int, int, int, int, int]:
    """One seed.

    Returns device and host blocks that were believed, those that engines still wrote, and kills with all written down.
    """
    rng = random.Random(seed)
    kinds = [make_spans(0), (*make_spans(0, 3), ReadSpan(4, is_chunk=True)), make_spans(0, 0, 2)]
    spans = kinds[seed % 4 - 1] if seed % 4 else (*make_spans(0), state_span(2))
    config = PoolConfig(
        num_blocks=rng.choice([6, 12, 24]) * len(spans),
        group_spans=spans,
        block_size=2,
        max_sequences=rng.choice([6, 10]),
        max_tokens_per_sequence=rng.choice([8, 16]),
        watermark=0.0,
        num_host_blocks=rng.choice([9, 33]) * len(spans),
    )
    world = TierWorld(config, alphabet=rng.choice([1, 2]), faults=rng.choice([6, 1000]))
    memory = KeptMemory(config)
    world.manager.restore(memory.kept, may_still_write=False)
    sums, num_whole = np.zeros(4, np.int64), 0

    def choose(count: int) -> int:
        return int(rng.random() * count)

    for _ in range(NUM_EVENTS):
        event = choose(100)
        session = any_session(world, choose)
        if not 22 <= event < 33 or not world.engines[session].sequences:
            act(world, session, event, choose)
        elif event < 30:
            world.manager.record.write(1 + choose(4))
        else:
            world.manager.maintenance.publish_pending()
            write_all(world.manager)
            num_whole += check_whole(world, memory)
        world.audit()
        if choose(2):
            sums += check_kill(world, memory)
    world.drain()
    return (*sums.tolist(), num_whole)


def check_kill(world: TierWorld, memory: KeptMemory) -> tuple[int, int, int, int]:
    """The service is killed now, its engines live.

    Returns the device and the host blocks that are believed, and those of each that may be written.
    """
    manager, result = memory.restored(may_still_write=True)
    assert not (wrong := manager.queries.check_invariants()), wrong
    assert manager.swapper is not None
    pools, believed = (manager.state.pool, manager.swapper.host.pool), np.zeros(2, np.int64)
    for group in range(len(world.spans)):
        found = chains(manager, group=group)
        for (tenant, tokens), places in found.items():
            spelled = world.contents.spell(f"{tenant}/{group}", list(tokens))[-world.config.block_size :]
            if group in world.states:
                spelled = spelled[-1:] * len(spelled)
            for slots, block in zip((world.memory.device, world.memory.host), places, strict=True):
                assert not block or slots[block] == spelled, f"block {block} is believed and holds something else"
        believed += np.count_nonzero(np.array(list(found.values()), np.int32).reshape(-1, 2), axis=0)
    assert [result.num_blocks, result.num_host_blocks] == believed.tolist()
    writes: tuple[set[int], set[int]] = (set(), set())
    for session in [*world.engines, *world.ended]:
        for known, blocks in zip(writes, in_flight(world, session), strict=True):
            known |= blocks
    for pool, blocks in zip(pools, writes, strict=True):
        exposed = {block for block in blocks if not pool.quarantine_counts[block] or pool.indexed[block]}
        assert not exposed, f"blocks {exposed} could be had, or are shared, while an engine writes them"
    check_residue(world, manager)
    manager.sessions.end_quarantine(EARLIER_RUN)
    assert not (wrong := manager.queries.check_invariants()), wrong
    assert all(pool.num_available == pool.num_blocks - 1 for pool in pools)
    return (*believed.tolist(), *map(len, writes))


def check_residue(world: TierWorld, manager: object) -> None:
    """What a block holds of another tenant is cleared before the block is used (R8)."""
    state = manager.state  # type: ignore[attr-defined]
    for block in range(1, state.pool.num_blocks):
        tenant = int(state.allocator.last_tenants[block])
        for name, contents in world.written.items():
            if tenant != UNKNOWN_TENANT and state.index.roots.find_tenant(name) != tenant:
                assert not contents.intersection(world.memory.device[block]), f"block {block} holds what {name!r} has written"
    assert len(state.index.roots.tenants) >= sum(1 for contents in world.written.values() if contents)


def check_whole(world: TierWorld, memory: KeptMemory) -> int:
    """All that is published is written down: what is restored equals what was, but for copies that are on the way."""
    manager, _ = memory.restored()
    for group in range(len(world.spans)):
        wanted = chains(world.manager, is_written=True, group=group)
        assert chains(manager, group=group) == wanted, "what is restored is not what was cached"
    return len(wanted) > 0


def test_what_is_restored_after_a_kill_is_what_the_memory_holds() -> None:
    sums = np.zeros(5, np.int64)
    for seed in range(NUM_SEEDS):
        try:
            sums += killed(seed)
        except BaseException as error:
            error.add_note(f"kept index, seed {seed}")
            raise
    # The run counts only if what it is about has happened.
    assert (sums > (500, 500, 500, 100, 10)).all(), sums


def test_a_table_that_does_not_forget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that another sequence has now is still believed; the table's own audit is not asked."""
    monkeypatch.setattr(SlotTable, "forget", lambda self, blocks: None)
    monkeypatch.setattr(IndexRecord, "check", lambda self: iter(()))
    with pytest.raises(AssertionError, match=r"is believed and holds something else|are shared, while an engine writes"):
        list(map(killed, range(NUM_SEEDS)))


_ADD_HOSTS = PrefixIndex.add_hosts


def _note_too_early(index: PrefixIndex, nodes: Int32Array, hosts: Int32Array, groups: np.ndarray | None = None) -> None:
    _ADD_HOSTS(index, nodes, hosts, groups)
    index.note_filled(hosts)


def test_a_host_copy_that_is_written_down_before_its_order_has_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "add_hosts", _note_too_early)
    monkeypatch.setattr(SlotTable, "has_rows", lambda self: np.zeros(len(self._checks), np.bool_))  # the audit is not asked
    faults = r"is believed and holds something else|are shared, while an engine writes|is not what was cached"
    with pytest.raises(AssertionError, match=faults):
        list(map(killed, range(NUM_SEEDS)))


def test_an_audit_finds_a_row_of_a_host_block_that_is_being_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "add_hosts", _note_too_early)
    for check in ("check_whole", "check_kill"):
        monkeypatch.setitem(globals(), check, lambda world, memory: 0)
    with pytest.raises(AssertionError, match="a host block is written down while an order fills it"):
        list(map(killed, range(NUM_SEEDS)))
