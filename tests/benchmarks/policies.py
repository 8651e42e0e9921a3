"""Time to first token by scheduling policy: the engine's scheduler on the real core, in virtual time.

A step costs a little, and a little more for each of its tokens, as below: so the figures are exact, and the same everywhere.
Ratios are to fcfs on the same arrivals, one for each seed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvkeeper.engine_service.scheduler.limits import Limits
from kvkeeper.engine_service.scheduler.policies import POLICY_NAMES, make_ordering
from kvkeeper.engine_service.scheduler.scheduler import Scheduler
from kvkeeper.engine_service.scheduler.waiting import FairShare, WaitingSequences
from kvkeeper.engine_service.values.request import Request, SequenceState
from tests.support.worlds.core_cache import CoreCache

_BASE_S, _TOKEN_S = 0.008, 0.00006  # a step, and each of its tokens
_BLOCK_SIZE, _MAX_LEN, _MAX_SEQUENCES = 16, 8192, 256
_NUM_BLOCKS = 8 * 1024
_SEEDS = range(3)
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the load."""

    at: float
    num_prompt: int
    num_new: int
    tenant: str
    priority: int


def figures() -> Iterator[dict[str, object]]:
    for name, burst in (("mixed", 60), ("overload", 160)):
        arrivals = {seed: _load(seed, burst) for seed in _SEEDS}
        plain = _ttft("fcfs", arrivals, is_fair=False)
        for policy in POLICY_NAMES:
            for is_fair in (False, True):
                found = _ttft(policy, arrivals, is_fair=is_fair)
                yield {"workload": name, "policy": policy, "fair_share": is_fair, **_compare(found, plain)}


def _load(seed: int, burst: int) -> list[Arrival]:
    """Chats all the time, long prompts now and then, and a burst of one tenant every 15 s."""
    rng = np.random.default_rng(seed)
    arrivals: list[Arrival] = []
    for at in np.cumsum(rng.exponential(1 / 6, int(6 * _SECONDS))):
        priority = int(rng.choice([-100, 0, 0, 0, 100]))
        arrivals.append(
            Arrival(float(at), int(rng.integers(20, 300)), int(rng.integers(16, 200)), f"chat{len(arrivals) % 4}", priority)
        )
    for at in np.cumsum(rng.exponential(1.0, int(_SECONDS))):
        arrivals.append(Arrival(float(at), int(rng.integers(2000, 8000)), int(rng.integers(16, 128)), "reader", 0))
    for begin in np.arange(5.0, _SECONDS, 15.0):
        lens = np.where(rng.random(burst) < 0.8, rng.integers(50, 600, burst), rng.integers(1500, 6000, burst))
        arrivals += [Arrival(float(begin), int(length), 64, "batch", -100) for length in lens]
    return sorted(arrivals, key=lambda arrival: arrival.at)


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds to the first token of every request, who asked, and what the policy did."""

    ttft: np.ndarray
    is_batch: np.ndarray
    num_switches: int


def _ttft(policy: str, loads: dict[int, list[Arrival]], *, is_fair: bool) -> list[Found]:
    return [_run(policy, arrivals, seed, is_fair=is_fair) for seed, arrivals in loads.items()]


def _compare(found: list[Found], plain: list[Found]) -> dict[str, object]:
    pairs = list(zip(found, plain, strict=True))

    def ratio(name: str) -> list[float]:
        measure = np.mean if name == "mean" else lambda times: np.percentile(times, 99)
        return [round(float(measure(own.ttft) / measure(other.ttft)), 3) for own, other in pairs]

    others = np.concatenate([own.ttft[~own.is_batch] for own in found])
    times = np.concatenate([own.ttft for own in found])
    return {
        "mean_s": round(float(times.mean()), 3),
        "p99_s": round(float(np.percentile(times, 99)), 3),
        "mean_of_other_tenants_s": round(float(others.mean()), 3),
        "mean_to_fcfs": ratio("mean"),
        "p99_to_fcfs": ratio("p99"),
        "switches": sum(own.num_switches for own in found),
    }


class _UnauditedCache(CoreCache):
    """The core, without a look at all of it after each step."""

    def __init__(self) -> None:
        super().__init__(_NUM_BLOCKS, _BLOCK_SIZE, _MAX_SEQUENCES)
        self.manager.queries.check_invariants = list  # type: ignore[method-assign]


def _run(policy: str, arrivals: list[Arrival], seed: int, *, is_fair: bool) -> Found:
    rng = np.random.default_rng(seed)
    waiting = WaitingSequences(make_ordering(policy), FairShare() if is_fair else None)
    limits = Limits(_BLOCK_SIZE, _MAX_LEN, _MAX_SEQUENCES)
    scheduler, cache = Scheduler(limits, waiting), _UnauditedCache()
    coming = [
        Request("r", rng.integers(0, 30_000, one.num_prompt, np.int32), one.num_new, tenant=one.tenant, priority=one.priority)
        for one in arrivals
    ]
    first: dict[Request, float] = {}
    now, num_come = 0.0, 0
    while num_come < len(coming) or not scheduler.is_empty:
        if scheduler.is_empty:
            now = max(now, arrivals[num_come].at)
        while num_come < len(coming) and arrivals[num_come].at <= now:
            scheduler.add(coming[num_come], arrivals[num_come].at)
            num_come += 1
        while (sequence := scheduler.next_to_create()) is not None:
            assert sequence.sequence_id is not None
            request = sequence.request
            tokens = sequence.token_ids.tolist()
            request.start_number = cache.create(
                sequence.sequence_id, tokens, request.max_len, request.priority, request.start_number
            )
            waiting.created(sequence)
        plan = scheduler.schedule(now)
        work = scheduler.apply(plan, cache.step(plan))  # type: ignore[arg-type]  # the core's reply has these columns, too
        now += _BASE_S + _TOKEN_S * int(work.num_new.sum())
        scheduler.advance(work, np.ones(len(work.logit_idx), np.int32))
        for sequence in work.sampled:
            first.setdefault(sequence.request, now)
            if sequence.num_output == sequence.request.max_new_tokens:
                scheduler.end_sequence(sequence)
    assert all(sequence.state is SequenceState.ENDED for request in coming for sequence in request.sequences)
    ttft = np.array([first[request] - request.arrived_at for request in coming])
    return Found(ttft, np.array([one.tenant == "batch" for one in arrivals]), waiting.ordering.num_switches)
