"""Hit rates on generated workloads: LRU, `adaptive` and the offline optimum, and the time that victims take.

Hit rates are of the core, and exact. `kvkeeper bench trace` replays recorded traces. Victims are timed apart, with a policy
alone: 2,000 at once of a full pool, LRU and `adaptive` in turns; what is put off until a step was answered is not in it.
"""

import time
from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.core.eviction import EvictionPolicy, Use, make_policy
from kvkeeper.cache_service.replay import replay_core, replay_optimum
from tests.support.reference.workloads import WORKLOADS

_SIZES = (200, 800)
_POOL, _LEN, _VICTIMS, _ROUNDS = 200_000, 100, 2000, 150


def figures() -> Iterator[dict[str, object]]:
    for name, workload in WORKLOADS.items():
        requests = workload(0)
        for num_blocks in _SIZES:
            lru, adaptive = (replay_core(requests, num_blocks, policy) for policy in ("lru", "adaptive"))
            yield {
                "workload": name,
                "blocks": num_blocks,
                "lru": round(lru.hit_rate, 4),
                "adaptive": round(adaptive.hit_rate, 4),
                "optimum": round(replay_optimum(requests, num_blocks).hit_rate, 4),
                "step_p50_ratio": round(float(np.median(adaptive.step_seconds) / np.median(lru.step_seconds)), 2),
            }
    yield _victims()


def _victims() -> dict[str, object]:
    policies = {name: _full(name) for name in ("lru", "adaptive")}
    took: dict[str, list[float]] = {name: [] for name in policies}
    for turn in range(_ROUNDS):
        for name, policy in policies.items():
            begin = time.perf_counter()
            victims = policy.take_victims(_VICTIMS)
            took[name].append(time.perf_counter() - begin)
            for part in np.split(victims, _VICTIMS // _LEN):
                _run(policy, part, turn)
    row: dict[str, object] = {"victims": _VICTIMS, "blocks": _POOL}
    for percent in (50, 99):
        lru, adaptive = (float(np.percentile(took[name], percent)) * 1e3 for name in policies)
        row |= {f"lru_p{percent}_ms": round(lru, 3), f"adaptive_p{percent}_ms": round(adaptive, 3)}
        row[f"p{percent}_ratio"] = round(adaptive / lru, 2)
    return row


def _full(name: str) -> EvictionPolicy:
    policy = make_policy(name, _POOL)
    for first in range(1, _POOL - _LEN, _LEN):
        _run(policy, np.arange(first, first + _LEN, dtype=np.int32), first)
    return policy


def _run(policy: EvictionPolicy, blocks: np.ndarray, number: int) -> None:
    tokens = (number * 7919 + blocks).astype(np.int32)
    policy.use(Use(blocks, tokens, root=-1, priority=0, num_blocks=len(blocks)))
    policy.add(blocks[::-1])
    policy.prepare()
