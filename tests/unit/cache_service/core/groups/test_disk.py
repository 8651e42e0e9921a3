"""Several groups of layers in a tier that is asked by name: a load brings what a hit reads, and no more."""

from collections.abc import Callable

import numpy as np
import pytest

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.tiers.content_tier import ContentTier
from kvkeeper.cache_service.core.tiers.lookup import ContentNames, TierLookup
from kvkeeper.cache_service.core.tiers.orders import TierRules
from kvkeeper.cache_service.core.values.copies import TierOrder, TierResult
from kvkeeper.cache_service.core.values.kv_spec import ReadSpan, state_span
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId
from tests.support.reference.read_spans import make_spans
from tests.support.tiers.disk_simulation import NUM_EVENTS, DiskSimulation
from tests.support.worlds.core_pool import compute

A = SessionId("a")
TOKENS = np.arange(11, dtype=np.int32)


def stored(
    *, lost: tuple[tuple[int, int], ...] = (), rules: TierRules | None = None, spans: tuple[ReadSpan, ...] = make_spans(0, 5)
) -> tuple[PoolManager, ContentTier]:
    """A pool whose two groups, the second with a window of 5 by default, have five entries on the disk alone.

    lost: entries and groups of what the disk forgot.
    """
    config = PoolConfig(41, 2, num_host_blocks=41, group_spans=spans, watermark=0.0)
    manager = PoolManager(config)
    disk = manager.add_disk(b"key", 40, 0, rules=rules or TierRules())
    manager.sessions.open(A, Executor.CACHE)
    compute(manager, A, 1, TOKENS)
    manager.one_item.release(A, 1)
    with manager.evictions.demoting(A):
        manager.evictions.evict_blocks(40)
    store = disk.stores.prepare(100)
    assert store is not None
    num_stored = 7 if spans[1].checkpoint_blocks else 10
    assert len({order.name for order in store.orders}) == len(store.orders) == num_stored
    disk.stores.complete(store, [TierResult.DONE] * num_stored)
    assert manager.swapper is not None
    index, names, table = manager.state.index, disk._names, disk.directory
    nodes = index.match(index.find_root(""), TOKENS, 5).tolist()
    for entry, group in lost:
        name = names.of_group(names.of(nodes[entry]), group)
        slot = table.find(name)
        assert slot is not None
        order = TierOrder(slot, 0, name, b"", b"", 0, 0)
        table.begin_read(order)
        table.end_read(order, is_lost=True)
    manager.swapper.host.pool.evict(num_stored)
    assert len(index) == 0
    return manager, disk


def load(manager: PoolManager, disk: ContentTier) -> list[tuple[int, int]]:
    """Entries and groups that a new sequence has loaded, all at once."""
    manager.creation.create(A, SequenceArgs(SequenceId(2), TOKENS))
    found = disk.loads.take()
    for each in found:
        disk.loads.complete(each, [TierResult.DONE] * len(each.orders))
    assert manager.queries.check_invariants() == []
    return [(order.entry, order.group) for each in found for order in each.orders]


def hit_len(manager: PoolManager) -> int:
    manager.one_item.extend(A, 2, 11, look_up=True)
    assert manager.queries.check_invariants() == []
    return manager.queries.view(A, 2).num_hit_tokens


def test_all_of_the_full_group_and_the_last_window_are_loaded() -> None:
    manager, disk = stored()
    assert load(manager, disk) == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1)]  # token 10 reads from token 6 on
    assert hit_len(manager) == 10


@pytest.mark.parametrize(
    ("lost", "loaded", "hit"),
    [
        ((), [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)], 8),
        (((3, 1),), [(0, 0), (1, 0), (1, 1)], 4),
        (((1, 1),), [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)], 8),
        (((3, 1), (1, 1)), [], 0),
    ],
    ids=str,
)
def test_the_last_state_alone_is_loaded(lost: tuple[tuple[int, int], ...], loaded: list[tuple[int, int]], hit: int) -> None:
    manager, disk = stored(lost=lost, spans=(*make_spans(0), state_span(2)))
    assert load(manager, disk) == loaded
    assert hit_len(manager) == hit


@pytest.mark.parametrize(
    ("lost", "end"),
    [(((4, 1),), 4), (((3, 1),), 3), (((3, 0),), 3), (((1, 0), (0, 1)), 0), (((2, 1), (4, 0)), 2), (((0, 0),), 0)],
    ids=str,
)
def test_a_load_ends_where_all_that_is_read_is_there(lost: tuple[tuple[int, int], ...], end: int) -> None:
    manager, disk = stored(lost=lost)
    found = load(manager, disk)
    assert max((entry for entry, _ in found), default=-1) == end - 1
    assert hit_len(manager) == 2 * end


def test_a_load_that_has_no_room_whole_is_shorter() -> None:
    manager, disk = stored(rules=TierRules(most_loading=6))
    found = load(manager, disk)
    assert 0 < len(found) <= 6
    entries = [entry for entry, group in found if group == 0]
    assert hit_len(manager) == 2 * len(entries) > 0


@pytest.mark.parametrize("lost", [(), tuple((at, 1) for at in range(5)), ((4, 1), (2, 1))], ids=str)
def test_each_block_is_looked_up_once_however_often_the_end_moves(
    lost: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, disk = stored(lost=lost)
    disk.rules = TierRules(most_loading=3)  # so loads are cut, too
    names: list[bytes] = []
    real = disk.directory.find

    def find(name: bytes) -> int | None:
        names.append(name)
        return real(name)

    monkeypatch.setattr(disk.directory, "find", find)
    moves: list[tuple[int, int]] = []
    real_end = TierLookup._end

    def end(self: TierLookup, most: int, is_there: Callable[[int, int], bool]) -> int:
        def counted(at: int, group: int) -> bool:
            moves.append((at, group))
            return is_there(at, group)

        moves.clear()
        return real_end(self, most, counted)

    monkeypatch.setattr(TierLookup, "_end", end)
    disk.loads.prepare(manager.state.index.find_root(""), TOKENS[:10])
    assert len(names) == len(set(names)) >= 5
    assert len(moves) == len(set(moves))


def test_what_failed_is_where_the_hit_ends() -> None:
    manager, disk = stored()
    manager.creation.create(A, SequenceArgs(SequenceId(2), TOKENS))
    (each,) = disk.loads.take()
    results = [TierResult.DAMAGED if (o.entry, o.group) == (3, 1) else TierResult.DONE for o in each.orders]
    disk.loads.complete(each, results)
    assert manager.queries.check_invariants() == []
    assert hit_len(manager) == 0, "what shorter hits would read was not loaded"


def test_a_load_that_leaves_a_window_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the name of a block does not tell its group."""
    monkeypatch.setattr(ContentNames, "of_group", lambda self, name, group: name)
    with pytest.raises(AssertionError):
        _run()


def _run() -> None:
    for seed in range(1, 60, 2):
        simulation = DiskSimulation(seed)
        for _ in range(NUM_EVENTS):
            simulation.tick()
        simulation.finish()
