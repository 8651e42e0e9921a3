"""Hit rates on generated workloads: LRU, `adaptive` and the offline optimum.

Hit rates are of the core, and exact. `kvkeeper bench trace` replays recorded traces.
"""

from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.replay import replay_core, replay_optimum
from tests.support.reference.workloads import WORKLOADS

_SIZES = (200, 800)


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
