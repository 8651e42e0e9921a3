"""The core under seeded simulation: a million operations, 50,000 of them a day, with lost and late messages, deaths, hangs."""

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from tests.sim.simulation import Counts, Simulation
from tests.soak.accounting import CHANGES_PER_SEED, simulate
from tests.support.slices import at_least, scaled, todays

NUM_OPERATIONS = 1_000_000  # audited at every 16th call, at every 8th refusal; the machines and the soak look at each


def test_a_million_seeded_operations(capsys: pytest.CaptureFixture[str]) -> None:
    started, counts = time.perf_counter(), Counts()
    seeds = range(1, 1 + -(-NUM_OPERATIONS // CHANGES_PER_SEED))
    todays_seeds = todays(seeds, scaled(len(seeds), 20))
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        for part in processes.map(partial(simulate, audit_every=16), todays_seeds, chunksize=4):
            counts.add(part)
    with capsys.disabled():
        print(json.dumps({"soak": "core", "seconds": round(time.perf_counter() - started, 1), "changes": counts.changes}))
    assert counts.changes >= scaled(NUM_OPERATIONS, 22)  # a seed has a few more or fewer
    # The run counts only if its faults fired and its guarded paths were on.
    for name in counts.__dataclass_fields__:
        assert getattr(counts, name) > at_least(100), name


def test_a_seed_replays_itself() -> None:
    def run() -> list[object]:
        simulation = Simulation(7)
        for _ in range(800):
            simulation.tick()
        return [simulation.world.snapshot(), simulation.finish()]

    assert run() == run()
