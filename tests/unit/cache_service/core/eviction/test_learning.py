"""The sources of the adaptive policy: history, ghosts, the LRU shadow and the hit density of cells."""

import numpy as np

from kvkeeper.cache_service.core.eviction.ghosts import Ghosts, Traces
from kvkeeper.cache_service.core.eviction.hit_density import NUM_AGES, NUM_CLASSES, HitDensity, age_idx, first_age
from kvkeeper.cache_service.core.eviction.lru_shadow import LruShadow
from kvkeeper.cache_service.core.eviction.policy import Use
from kvkeeper.cache_service.core.eviction.use_history import History, PrefixHasher


def traces(uses: int, stamps: list[int]) -> Traces:
    return Traces(np.full(len(stamps), uses, np.uint8), np.array(stamps, np.int64))


def hashes(*tokens: int, root: int = -1) -> np.ndarray:
    """Of the prefixes of one sequence, in blocks of two tokens."""
    history = History(64, NUM_CLASSES)
    history.record([use(*tokens, root=root)], Ghosts(64, 64), 0)
    return history.hashes[1 : 1 + len(tokens) // 2]


def use(*tokens: int, first_block: int = 1, root: int = -1) -> Use:
    blocks = np.arange(first_block, first_block + len(tokens) // 2, dtype=np.int32)
    return Use(blocks, np.array(tokens, np.int32), root, priority=0, num_blocks=len(blocks))


def test_a_prefix_has_the_same_hash_whole_and_in_parts() -> None:
    whole = hashes(1, 2, 3, 4, 5, 6)
    history, ghosts = History(64, NUM_CLASSES), Ghosts(64, 64)
    for length in (2, 4, 6):
        history.record([use(*range(1, length + 1))], ghosts, 0)
    assert history.hashes[1:4].tolist() == whole.tolist()


def test_a_batch_counts_as_its_sequences_one_by_one() -> None:
    batch = [use(1, 2, 3, 4), use(1, 2), use(5, 6, 7, 8, first_block=9, root=-2), use(1, 2, 3, 4, 9, 9)]
    at_once, one_by_one, ghosts = History(64, NUM_CLASSES), History(64, NUM_CLASSES), Ghosts(64, 64)
    for _ in range(4):
        at_once.record(batch, ghosts, 0)
        for one in batch:
            one_by_one.record([one], ghosts, 0)
        assert at_once.uses.tolist() == one_by_one.uses.tolist()
        assert at_once.hashes.tolist() == one_by_one.hashes.tolist()
    assert at_once.uses[[1, 2, 3, 9]].tolist() == [NUM_CLASSES, NUM_CLASSES, 4, 4]


def test_a_parent_has_the_uses_that_a_ghost_gave_its_child() -> None:
    history, ghosts, known = History(64, NUM_CLASSES), Ghosts(64, 64), hashes(1, 2, 3, 4)
    ghosts.remember(known[1:], np.array([5], np.uint8), np.array([3]), now=4)
    found = history.record([use(1, 2, 3, 4)], ghosts, 4)
    assert history.uses[1:3].tolist() == [6, 6]
    assert sorted(found.uses.tolist()) == [0, 5]


def test_hashing_many_places_keeps_the_first_ones() -> None:
    hasher, before = PrefixHasher(), np.zeros(1, np.uint64)
    short = hasher.prefixes(np.arange(4, dtype=np.int32), 2, np.arange(2), before, np.array([2]))
    long = hasher.prefixes(np.arange(80, dtype=np.int32), 2, np.arange(40), before, np.array([40]))
    assert long[:2].tolist() == short.tolist()


def test_a_hash_tells_order_place_and_tenant_apart() -> None:
    different = [hashes(1, 2), hashes(2, 1), hashes(1, 2, root=-2), hashes(3, 4, 1, 2), hashes(1, 2, 3, 4), hashes(1, 2, 1, 2)]
    assert len({int(prefix[-1]) for prefix in different}) == len(different)


def test_a_ghost_is_recognised_once() -> None:
    ghosts, known = Ghosts(64, 64), hashes(1, 2, 3, 4)
    ghosts.remember(known, np.array([2, 1], np.uint8), np.array([7, 8]), now=9)
    found = ghosts.pop(known, now=12)
    assert (found.uses.tolist(), found.stamps.tolist()) == ([2, 1], [7, 8])
    assert ghosts.pop(known, now=12).uses.tolist() == [0, 0]
    assert ghosts.pop(hashes(5, 6), now=12).uses.tolist() == [0]


def test_stamps_of_ghosts_survive_their_few_bits() -> None:
    ghosts, known, now = Ghosts(64, 64), hashes(1, 2), 2**33 + 5
    ghosts.remember(known, np.array([1], np.uint8), np.array([2**33 - 3]), now=now)
    assert ghosts.pop(known, now=now).stamps.tolist() == [2**33 - 3]


def test_a_replaced_ghost_is_in_the_answer() -> None:
    ghosts = Ghosts(256, 1024)
    rng = np.random.default_rng(0)
    lost = 0
    for now in range(1, 9):
        replaced = ghosts.remember(
            rng.integers(0, 2**63, 1024).astype(np.uint64), np.ones(1024, np.uint8), np.full(1024, now), now
        )
        lost += np.count_nonzero(replaced.uses)
    assert lost > 3 * 1024


def test_the_lru_shadow_keeps_the_blocks_used_last() -> None:
    lru_shadow = LruShadow(64)  # slices of one stamp
    lru_shadow.enter(np.array([1]))
    lru_shadow.enter(np.array([2, 3]))
    lru_shadow.shrink(2)
    assert lru_shadow.leave(np.array([1, 2, 3])).tolist() == [False, True, True]
    lru_shadow.enter(np.array([4, 5]))
    lru_shadow.shrink(2)
    assert lru_shadow.leave(np.array([5])).tolist() == [True]


def test_the_lru_shadow_forgets_blocks_that_waited_longer_than_it_counts() -> None:
    lru_shadow = LruShadow(64)
    lru_shadow.enter(np.array([1]))
    lru_shadow.enter(np.array([10_000]))
    assert lru_shadow.leave(np.array([1, 10_000])).tolist() == [False, True]


def test_ages_are_half_octaves() -> None:
    assert [age_idx(age) for age in (0, 1, 2, 3, 4, 1024, 2**40)] == [0, 0, 2, 3, 4, 20, NUM_AGES - 1]
    assert all(age_idx(first_age(idx)) in (idx, idx + 1) for idx in range(2, NUM_AGES - 1))


def test_before_a_lesson_only_age_counts() -> None:
    table = HitDensity().table
    assert all(row == table[0] for row in table)
    assert table[0] == sorted(table[0], reverse=True)


def test_hit_density_never_falls_with_uses_nor_grows_with_age() -> None:
    rng, density, now = np.random.default_rng(1), HitDensity(), 10**6
    for _ in range(50):
        stamps = now - rng.integers(1, 10**5, 40)
        uses = rng.integers(1, NUM_CLASSES + 1, 40).astype(np.uint8)
        (density.saw_reuse if rng.random() < 0.4 else density.lost_sight)(Traces(uses, stamps), now)
        density.learn([], now, 3.0)
        table = np.array(density.table)
        assert np.isfinite(table).all()
        assert (np.diff(table, axis=0) >= 0).all()
        assert (np.diff(table, axis=1) <= 0).all()


def test_blocks_that_return_have_a_higher_hit_density() -> None:
    density, now = HitDensity(), 10**5
    density.saw_reuse(traces(2, [now - 500] * 300), now)
    density.lost_sight(traces(1, [now - 5000] * 1000), now)
    density.learn([], now, 10.0)
    assert density.table[1][age_idx(100)] > 4 * density.table[0][age_idx(100)]


def test_a_few_requests_are_no_evidence() -> None:
    density, now = HitDensity(), 10**5
    density.saw_reuse(traces(1, [now - 500] * 300), now)
    density.lost_sight(traces(1, [now - 5000] * 300), now)
    density.lost_sight(traces(2, [now - 5000] * 5), now)
    density.saw_reuse(traces(3, [now - 500] * 5), now)
    density.learn([], now, 10.0)
    assert density.table[2][age_idx(100)] < 1.5 * density.table[1][age_idx(100)]


def test_waiting_in_vain_counts() -> None:
    """Old blocks that are still cached have seen no reuse for so long; without them only the lucky would be counted."""
    now = 10**5
    tables = []
    for waiting in ([], [(traces(2, [now - 20_000] * 1000), 1)]):
        density = HitDensity()
        density.saw_reuse(traces(2, [now - 500] * 100), now)
        density.learn(waiting, now, 1.0)
        tables.append(density.table[1][age_idx(100)])
    assert tables[1] < 0.5 * tables[0]
