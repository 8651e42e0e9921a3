"""Row 5: a prefix hit is never wrong, and a full hit leaves a token to compute.

Several engines generate on one pool at once, from prompts that end around block edges and share their
beginnings; every output is compared with the one that the model makes without a cache.
"""

import random

import numpy as np

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Executor
from tests.soak.row import Counts
from tests.soak.toy_engine import ALPHABET, Memory, ToyEngine, Trace
from tests.support.worlds.drivers import CoreDriver

_TRACES_PER_ENGINE = 40
_MOST_STEPS = 20_000
TENANTS = ("", "other")


def make_traces(rng: random.Random, block_size: int, count: int, most_blocks: int) -> list[Trace]:
    """Prompts of kB - 1, kB and kB + 1 tokens that branch off a few stems."""
    stems = [[rng.randrange(ALPHABET) for _ in range((most_blocks + 1) * block_size)] for _ in range(2)]
    traces = []
    for _ in range(count):
        length = max(1, rng.randint(1, most_blocks) * block_size + rng.choice([-1, 0, 1]))
        prompt = rng.choice(stems)[:length]
        if rng.random() < 0.3:
            at = rng.randrange(length)
            prompt = prompt[:at] + [rng.randrange(ALPHABET) for _ in range(length - at)]
        traces.append(Trace(prompt, rng.randint(1, 2 * block_size + 1), rng.choice(TENANTS), rng.random() < 0.9))
    return traces


def run_engines(engines: list[ToyEngine], rng: random.Random) -> None:
    """Steps them in any order until all have ended."""
    for _ in range(_MOST_STEPS):
        busy = [engine for engine in engines if not engine.is_idle]
        if not busy:
            return
        rng.choice(busy).step()
    raise AssertionError("no progress")


def run(seed: int) -> Counts:
    """Counts traces; the fault is a hit, because without one nothing was shown."""
    rng = random.Random(seed)
    block_size, most_blocks = rng.choice([1, 2, 3, 4]), rng.choice([2, 4])
    config = PoolConfig(
        num_blocks=rng.choice([most_blocks + 5, 3 * most_blocks + 5, 40]),
        block_size=block_size,
        max_sequences=256,
        max_tokens_per_sequence=(most_blocks + 4) * block_size,
        watermark=rng.choice([0.0, 0.1]),
    )
    driver = CoreDriver(config)
    memory: Memory = np.full(config.num_blocks * block_size, -1, np.int64)
    engines = [ToyEngine(driver, memory, rng.choice(list(Executor)), rng) for _ in range(3)]
    traces = []
    for engine in engines:
        mine = make_traces(rng, block_size, _TRACES_PER_ENGINE, most_blocks)
        traces += mine
        for trace in mine:
            engine.submit(trace)
    run_engines(engines, rng)
    assert all(trace.output is not None for trace in traces)
    assert driver.check_invariants() == []
    return Counts(len(traces), sum(trace.num_hits for trace in traces))
