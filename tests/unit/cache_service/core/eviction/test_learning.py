"""The sources of the adaptive policy: history, ghosts, the LRU shadow and the hit density of cells."""

import numpy as np

from kvkeeper.cache_service.core.eviction.adaptive import AdaptivePolicy
from kvkeeper.cache_service.core.eviction.block_queue import Stamps
from kvkeeper.cache_service.core.eviction.credit import ANY_DIFFERENCE, Credit
from kvkeeper.cache_service.core.eviction.ghosts import Ghosts, Traces
from kvkeeper.cache_service.core.eviction.hit_density import HitDensity
from kvkeeper.cache_service.core.eviction.leaves import Leaves
from kvkeeper.cache_service.core.eviction.lru_shadow import LruShadow
from kvkeeper.cache_service.core.eviction.policy import Use
from kvkeeper.cache_service.core.eviction.use_history import CLASSES_PER_USE, MOST_USES, NUM_CLASSES, History, PrefixHasher


def traces(uses: int, stamps: list[int]) -> Traces:
    """Of blocks that were used so often, by requests of one kind."""
    classes = np.full(len(stamps), (uses - 1) * CLASSES_PER_USE, np.uint8)
    return Traces(classes, np.ones(len(stamps), np.uint8), np.array(stamps, np.int64))


def density(hit_density: HitDensity, uses: int, age: int) -> float:
    return float(hit_density.of(traces(uses, [0]), age)[0])


def hashes(*tokens: int, root: int = -1) -> np.ndarray:
    """Of the prefixes of one sequence, in blocks of two tokens."""
    history = History(64)
    history.record([use(*tokens, root=root)], Ghosts(64), 0)
    return history.hashes[1 : 1 + len(tokens) // 2]


def use(*tokens: int, first_block: int = 1, root: int = -1) -> Use:
    blocks = np.arange(first_block, first_block + len(tokens) // 2, dtype=np.int32)
    return Use(blocks, np.array(tokens, np.int32), root, priority=0, num_blocks=len(blocks))


def test_a_prefix_has_the_same_hash_whole_and_in_parts() -> None:
    whole = hashes(1, 2, 3, 4, 5, 6)
    history, ghosts = History(64), Ghosts(64)
    for length in (2, 4, 6):
        history.record([use(*range(1, length + 1))], ghosts, 0)
    assert history.hashes[1:4].tolist() == whole.tolist()


def test_a_batch_counts_as_its_sequences_one_by_one() -> None:
    batch = [use(1, 2, 3, 4), use(1, 2), use(5, 6, 7, 8, first_block=9, root=-2), use(1, 2, 3, 4, 9, 9)]
    at_once, one_by_one, ghosts = History(64), History(64), Ghosts(64)
    for _ in range(4):
        at_once.record(batch, ghosts, 0)
        for one in batch:
            one_by_one.record([one], ghosts, 0)
        assert at_once.uses.tolist() == one_by_one.uses.tolist()
        assert at_once.hashes.tolist() == one_by_one.hashes.tolist()
    assert at_once.uses[[1, 2, 3, 9]].tolist() == [MOST_USES, MOST_USES, 4, 4]


def test_a_block_that_comes_back_keeps_its_past_and_so_do_those_above_it() -> None:
    history, ghosts, known = History(64), Ghosts(64), hashes(1, 2, 3, 4, 5, 6)
    ghosts.remember(known[1:2], traces(3, [3]), now=4)
    found = history.record([use(1, 2, 3, 4, 5, 6)], ghosts, 4)
    assert (found.classes.tolist(), found.stamps.tolist()) == ([2 * CLASSES_PER_USE], [3])
    assert history.uses[1:4].tolist() == [4, 4, 1]  # a block was used at least as often as one below it
    assert history.turns[1:4].tolist() == [1, 1, 2]


def test_turns_are_counted_along_a_conversation() -> None:
    history, ghosts = History(64), Ghosts(64)
    history.record([use(1, 2), use(1, 2, 3, 4)], ghosts, 0)
    history.record([use(1, 2, 3, 4, 5, 6)], ghosts, 0)
    assert history.turns[1:4].tolist() == [1, 2, 3]


def test_a_class_tells_uses_turn_size_and_the_last_block_apart() -> None:
    first, second, long = History(64), History(64), History(64)
    first.record([use(1, 2, 3, 4)], Ghosts(64), 0)
    second.record([use(1, 2, 3, 4)], Ghosts(64), 0)
    second.record([use(1, 2, 3, 4, 5, 6)], Ghosts(64), 0)
    long.record([use(*range(80))], Ghosts(64), 0)
    classes = {*first.classes[1:3].tolist(), *second.classes[1:4].tolist(), int(long.classes[1])}
    assert len(classes) == 5  # the two first blocks of the second turn are of one kind
    assert max(classes) < NUM_CLASSES


def test_hashing_many_places_keeps_the_first_ones() -> None:
    hasher, before = PrefixHasher(), np.zeros(1, np.uint64)
    short = hasher.prefixes(np.arange(4, dtype=np.int32), 2, np.arange(2), before, np.array([2]))
    long = hasher.prefixes(np.arange(80, dtype=np.int32), 2, np.arange(40), before, np.array([40]))
    assert long[:2].tolist() == short.tolist()


def test_a_hash_tells_order_place_and_tenant_apart() -> None:
    different = [hashes(1, 2), hashes(2, 1), hashes(1, 2, root=-2), hashes(3, 4, 1, 2), hashes(1, 2, 3, 4), hashes(1, 2, 1, 2)]
    assert len({int(prefix[-1]) for prefix in different}) == len(different)


def test_a_ghost_is_recognised_once() -> None:
    ghosts, known = Ghosts(64), hashes(1, 2, 3, 4)
    two = Traces(np.array([9, 4], np.uint8), np.array([2, 1], np.uint8), np.array([7, 8]))
    ghosts.remember(known, two, now=9)
    found = ghosts.pop(known, now=12)
    assert [column.tolist() for column in found] == [[9, 4], [2, 1], [7, 8]]
    assert ghosts.pop(known, now=12).turns.tolist() == [0, 0]
    assert ghosts.pop(hashes(5, 6), now=12).turns.tolist() == [0]


def test_in_a_large_pool_one_block_in_eight_leaves_a_trace() -> None:
    ghosts, known = Ghosts(1 << 19), np.random.default_rng(0).integers(0, 2**63, 8000).astype(np.uint64)
    ghosts.remember(known, traces(1, [5] * 8000), now=9)
    assert ghosts.every == 8
    assert 800 < np.count_nonzero(ghosts.pop(known, now=9).turns) < 1200


def test_stamps_of_ghosts_survive_their_few_bits() -> None:
    ghosts, known, now = Ghosts(64), hashes(1, 2), 2**33 + 5
    ghosts.remember(known, traces(1, [2**33 - 3]), now=now)
    assert ghosts.pop(known, now=now).stamps.tolist() == [2**33 - 3]


def test_a_replaced_ghost_is_in_the_answer() -> None:
    ghosts = Ghosts(64)
    rng = np.random.default_rng(0)
    lost = 0
    for now in range(1, 9):
        replaced = ghosts.remember(rng.integers(0, 2**63, 1024).astype(np.uint64), traces(1, [now] * 1024), now)
        lost += np.count_nonzero(replaced.turns)
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


def test_before_a_lesson_only_age_counts() -> None:
    fresh = HitDensity(64)
    assert all(row == fresh.table.tolist()[0] for row in fresh.table.tolist())
    assert density(fresh, 1, 10) > density(fresh, 4, 100)


def test_a_cycle_makes_the_oldest_the_most_valuable() -> None:
    """Where everything returns after 1,000 blocks, the one that waited 900 is the next, and the one just used the last."""
    found, now = HitDensity(64), 10**5
    found.saw_reuse(traces(4, [now - 1000] * 500), now)
    found.learn([], now, 4.0)
    assert density(found, 4, 900) > 4 * density(found, 4, 10)


def test_hit_densities_are_numbers_whatever_was_seen() -> None:
    rng, found, now = np.random.default_rng(1), HitDensity(64), 10**6
    for _ in range(50):
        stamps = now - rng.integers(1, 10**6, 40)
        blocks = Traces(rng.integers(0, NUM_CLASSES, 40).astype(np.uint8), np.ones(40, np.uint8), stamps)
        (found.saw_reuse if rng.random() < 0.4 else found.lost_sight)(blocks, now, int(rng.integers(1, 9)))
        found.learn([], now, 3.0)
        assert np.isfinite(found.table).all()
        assert (found.table >= 0).all()


def test_blocks_that_return_have_a_higher_hit_density() -> None:
    found, now = HitDensity(64), 10**5
    found.saw_reuse(traces(2, [now - 500] * 300), now)
    found.lost_sight(traces(1, [now - 5000] * 1000), now)
    found.learn([], now, 10.0)
    assert density(found, 2, 100) > 4 * density(found, 1, 100)


def test_a_few_requests_are_no_evidence() -> None:
    found, now = HitDensity(64), 10**5
    found.saw_reuse(traces(1, [now - 500] * 300), now)
    found.lost_sight(traces(1, [now - 5000] * 300), now)
    found.lost_sight(traces(2, [now - 5000] * 5), now)
    found.saw_reuse(traces(3, [now - 500] * 5), now)
    found.learn([], now, 10.0)
    assert density(found, 3, 100) < 1.5 * density(found, 2, 100)


def test_waiting_in_vain_counts() -> None:
    """Old blocks that are still cached have seen no reuse for so long; without them only the lucky would be counted."""
    now = 10**5
    tables = []
    for waiting in ([], [(traces(2, [now - 20_000] * 1000), 1)]):
        found = HitDensity(64)
        found.saw_reuse(traces(2, [now - 500] * 100), now)
        found.learn(waiting, now, 1.0)
        tables.append(density(found, 2, 100))
    assert tables[1] < 0.5 * tables[0]


def test_a_parent_is_a_leaf_when_its_last_child_was_removed() -> None:
    stamps = Stamps(16)
    leaves, rng = Leaves(16, stamps), np.random.default_rng(0)

    def blocks(*ids: int) -> np.ndarray:
        return np.array(ids, np.int32)

    def found() -> list[int]:
        return sorted(leaves.sample(9, stamps.clock, rng).tolist())

    leaves.link(blocks(1, 2, 2, 2), blocks(2, 3, 4, 3))  # a pair may repeat
    stamps.give(blocks(4, 3, 2, 1))
    leaves.add(blocks(4, 3, 2, 1))
    assert found() == [3, 4]
    assert leaves.sample(9, 1, rng).tolist() == [4]  # of those that wait since later it is not known yet
    for evicted, left in (([3], [4]), ([4], [2]), ([2], [1])):
        stamps.end_waits(blocks(*evicted))
        leaves.remove(blocks(*evicted))
        assert found() == left
    stamps.end_waits(blocks(1))
    assert found() == []


def test_a_block_that_began_to_wait_after_its_child_was_counted_is_ranked_once() -> None:
    policy = AdaptivePolicy(64)

    def end(blocks: list[int], num_first: int) -> None:
        """A sequence ends: its last blocks begin to wait and are counted, then the others."""
        path = np.array(blocks, np.int32)
        policy.use(Use(path, path, root=-1, priority=0, num_blocks=len(path)))
        policy.add(path[::-1][:num_first])
        policy.forget_blocks(np.array([63], np.int32))
        policy.add(path[::-1][num_first:])

    end([1, 2, 3, 4], 2)
    victims = [*policy.take_victims(1).tolist(), *policy.take_victims(1).tolist()]
    end(list(range(10, 40)), 29)
    victims += policy.take_victims(10).tolist()
    assert victims[:4] == [4, 3, 2, 1]
    assert len(set(victims)) == 12


def count(credit: Credit, num_used: int, **counts: int) -> None:
    """In batches, as they come."""
    for _ in range(num_used // 10):
        credit.count(10, counts.get("hits", 0), counts.get("lru_hits", 0), counts.get("gained", 0))


def test_what_was_lost_ends_the_credit_and_what_is_won_renews_it() -> None:
    credit = Credit(1000)
    count(credit, 1000, hits=5, lru_hits=5)
    assert credit.trust(0, 10.0) == ANY_DIFFERENCE
    count(credit, 100, hits=5, lru_hits=6, gained=-1)
    assert credit.trust(0, 10.0) == 0.4  # a little below 0
    count(credit, 100, hits=5, lru_hits=6, gained=-1)
    assert credit.trust(0, 10.0) == 0
    count(credit, 200, hits=6, lru_hits=5, gained=1)
    assert credit.trust(0, 10.0) == ANY_DIFFERENCE


def test_where_lru_has_no_hits_nothing_can_be_lost() -> None:
    credit = Credit(1000)
    count(credit, 1000, hits=5, lru_hits=5)
    credit.count(10, 0, 5, -500)
    count(credit, 1000)
    assert not credit.trust(0, 10.0)  # what fits into the cache comes back after a turnover
    count(credit, 1500)
    assert credit.trust(0, 10.0) == ANY_DIFFERENCE


def test_where_hits_break_off_no_more_may_be_missing_than_was_won() -> None:
    credit = Credit(1000)
    count(credit, 2000, hits=5, lru_hits=4, gained=1)
    assert credit.trust(900, 10.0)
    count(credit, 600)
    assert not credit.trust(900, 10.0)
    assert credit.trust(100, 10.0)


def test_blocks_that_lru_would_have_are_missed_until_it_would_evict_them_or_they_return() -> None:
    lru_shadow = LruShadow(256)  # slices of one stamp
    lru_shadow.enter(np.array([1, 2, 3]))
    lru_shadow.note_evicted(np.array([1, 2, 3]))
    assert lru_shadow.num_missing == 3
    assert lru_shadow.leave_ghosts(np.array([2]), 1) == 1
    assert lru_shadow.num_missing == 2
    lru_shadow.enter(np.array([4]))
    lru_shadow.shrink(1)
    assert lru_shadow.num_missing == 0
    assert lru_shadow.leave_ghosts(np.array([1]), 1) == 0
