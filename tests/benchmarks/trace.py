"""Hit rates on generated workloads and on cycles longer than the pool: LRU, `adaptive` and the offline optimum.

Last, loads of a hybrid model, whose hits end at states. Hit rates are of the core, and exact. `kvkeeper bench trace` replays
recorded traces.
"""

from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.replay import Requests, replay_core, replay_optimum
from tests.support.reference.state_replay import LOADS, NUM_BLOCKS, StateReplay
from tests.support.reference.workloads import WORKLOADS, loop

_SIZES = (200, 800)
_CYCLES = (1.05, 1.25, 1.5, 2, 3, 6)  # times the pool
_PASSES, _DOCUMENT = 16, 8
_STATE_PROMPTS = 900


def figures() -> Iterator[dict[str, object]]:
    for name, workload in WORKLOADS.items():
        for num_blocks in _SIZES:
            yield {"workload": name, **_figure(workload(0), num_blocks)}
    for times in _CYCLES:
        for num_blocks in _SIZES:
            documents = int(times * num_blocks) // _DOCUMENT
            requests = loop(0, num_documents=documents, length=_DOCUMENT, num_requests=_PASSES * documents)
            yield {"workload": f"cycle of {times} times the pool", **_figure(requests, num_blocks)}

    for name, load in LOADS.items():
        prompts = load(0, _STATE_PROMPTS)
        lru, adaptive = (StateReplay(NUM_BLOCKS[name], policy).run(prompts).hit_rate for policy in ("lru", "adaptive"))
        yield {"workload": f"states: {name}", "blocks": NUM_BLOCKS[name], "lru": round(lru, 4), "adaptive": round(adaptive, 4)}


def _figure(requests: Requests, num_blocks: int) -> dict[str, object]:
    lru, adaptive = (replay_core(requests, num_blocks, policy) for policy in ("lru", "adaptive"))
    return {
        "blocks": num_blocks,
        "lru": round(lru.hit_rate, 4),
        "adaptive": round(adaptive.hit_rate, 4),
        "optimum": round(replay_optimum(requests, num_blocks).hit_rate, 4),
        "step_p50_ratio": round(float(np.median(adaptive.step_seconds) / np.median(lru.step_seconds)), 2),
    }
