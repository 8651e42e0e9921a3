"""Hit rates of LRU and `adaptive` on generated workloads, against the core. `kvkeeper bench trace` replays recorded ones."""

from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.replay import replay_core
from tests.support.reference.workloads import WORKLOADS

_SIZES = (200, 800)


def figures() -> Iterator[dict[str, object]]:
    for name in ("multi_turn", "zipf", "scan"):
        requests = WORKLOADS[name](0)
        for num_blocks in _SIZES:
            for policy in ("lru", "adaptive"):
                replayed = replay_core(requests, num_blocks, policy)
                yield {
                    "workload": name,
                    "policy": policy,
                    "blocks": num_blocks,
                    "hit_rate": round(replayed.hit_rate, 4),
                    "evictions": replayed.num_evicted,
                    "step_p50_us": round(float(np.median(replayed.step_seconds)) * 1e6, 1),
                }
