"""Eviction policies on generated workloads: hits, and leaves before parents once a policy has learned."""

from typing import Any

import pytest

from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.values.types import Int32Array
from kvkeeper.cache_service.replay import CoreReplay, replay_core, replay_optimum
from tests.support.reference.policy_replay import replay_policy
from tests.support.reference.workloads import WORKLOADS, loop, multi_turn, recency, scan, zipf
from tests.support.slices import todays

_CASES = [(name, num_blocks) for name in WORKLOADS for num_blocks in (60, 250, 1000)]
_PASSES = 16  # of a cycle


@pytest.mark.parametrize(("name", "num_blocks"), todays(_CASES, 5))
def test_adaptive_is_never_below_lru(name: str, num_blocks: int) -> None:
    requests = WORKLOADS[name](7)
    lru, adaptive = (replay_policy(requests, num_blocks, policy).hit_rate for policy in ("lru", "adaptive"))
    assert adaptive >= lru - 0.002


def test_adaptive_keeps_returning_blocks_during_a_scan() -> None:
    """The guard of the test above: the policy does deviate, and gains by it."""
    requests = scan(3)
    assert replay_policy(requests, 200, "adaptive").hit_rate > 1.1 * replay_policy(requests, 200, "lru").hit_rate


@pytest.mark.in_turn
def test_adaptive_recovers_from_a_change() -> None:
    """A cycle that just fits follows on what won."""
    for seed in (0, 1, 2):
        requests = WORKLOADS["phases"](seed)
        lru, adaptive = (replay_policy(requests, 800, policy).hit_rate for policy in ("lru", "adaptive"))
        assert adaptive >= lru - 0.002


@pytest.mark.each_value
@pytest.mark.parametrize("num_blocks", [250, 1000])
@pytest.mark.parametrize("times", [1.05, 1.25, 2, 6])
def test_adaptive_keeps_what_it_can_of_a_cycle(num_blocks: int, times: float) -> None:
    documents = int(times * num_blocks / 2)
    requests = loop(0, num_documents=documents, length=2, num_requests=_PASSES * documents)
    best = replay_optimum(requests, num_blocks).hit_rate
    assert replay_policy(requests, num_blocks, "lru").hit_rate == 0
    assert replay_policy(requests, num_blocks, "adaptive").hit_rate >= 0.85 * best


@pytest.mark.in_turn
def test_what_becomes_a_leaf_after_the_ranking_competes_with_what_was_ranked() -> None:
    """Where it waits for the next ranking, a cycle among scans has 0.01 fewer hits."""
    rates = [replay_policy(WORKLOADS["scan_in_loop"](seed), 1000, "adaptive").hit_rate for seed in (0, 1)]
    assert sum(rates) / 2 > 0.575


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["loop", "agents", "loop_beside_chat"])
def test_the_core_has_the_hits_of_the_fast_replay(name: str) -> None:
    """Victims are ranked between the steps of a request, and that costs no hits."""
    requests = WORKLOADS[name](3)[:1500]
    core, fast = replay_core(requests, 400, "adaptive"), replay_policy(requests, 400, "adaptive")
    assert core.hit_rate == pytest.approx(fast.hit_rate, abs=0.005)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_victims_are_leaves_in_the_core(policy: str) -> None:
    requests = [request for three in zip(zipf(1), multi_turn(1), recency(1), strict=True) for request in three][:900]
    replay = CoreReplay(150, policy)
    index = replay.manager.state.index
    forget = index.forget_blocks
    num_forgotten = 0

    def forget_leaves(blocks: Int32Array, *why: Any) -> Int32Array:
        nonlocal num_forgotten
        num_forgotten += len(blocks)
        lost = forget(blocks, *why)
        assert len(lost) == 0
        return lost

    index.forget_blocks = forget_leaves  # type: ignore[method-assign]
    for request in requests:
        replay.run(request)
    assert num_forgotten > 5000
    assert replay.manager.queries.check_invariants() == []


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_fast_replay_has_the_hits_of_the_core(policy: str) -> None:
    """Except for the effect of the one block more that the core computes into, where a request is as long as the pool."""
    requests = zipf(2, num_requests=400)
    core, fast = replay_core(requests, 120, policy), replay_policy(requests, 120, policy)
    assert core.num_blocks == fast.num_blocks
    assert core.hit_rate == pytest.approx(fast.hit_rate, abs=0.01)


def test_no_policy_beats_the_optimum() -> None:
    requests = zipf(4, num_requests=600)
    best = replay_optimum(requests, 200).num_hits
    rates = {policy: replay_policy(requests, 200, policy).num_hits for policy in POLICY_NAMES}
    assert max(rates.values()) <= best
    assert replay_optimum(requests, 10**6).num_hits == replay_policy(requests, 10**5, "lru").num_hits


def test_the_optimum_keeps_the_parents_of_a_prompt_that_does_not_fit_whole() -> None:
    assert replay_optimum([[1, 2, 3], [4], [1, 2, 3]], 3).num_hits == 2
    assert replay_optimum([[3, 2, 1], [4], [3, 2, 1]], 3).num_hits == 2
