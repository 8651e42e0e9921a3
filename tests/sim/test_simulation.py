"""The core under seeded simulation: RELIABILITY 1, 12, 13, 14 and 20, a short slice of `python -m tests.sim.soak`."""

import json
import time

import pytest

from tests.sim.simulation import Simulation
from tests.sim.soak import main, soak

NUM_OPERATIONS = 1_000_000


def test_a_million_seeded_operations_with_an_audit_after_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.perf_counter()
    counts = soak(NUM_OPERATIONS, seed=1)
    with capsys.disabled():
        print(json.dumps({"soak": "core", "seconds": round(time.perf_counter() - started, 1), "changes": counts.changes}))
    assert counts.changes >= NUM_OPERATIONS
    # The run counts only if its faults fired and its guarded paths were on.
    for name in counts.__dataclass_fields__:
        assert getattr(counts, name) > 100, name


def test_a_seed_replays_itself() -> None:
    def run() -> list[object]:
        simulation = Simulation(7)
        for _ in range(800):
            simulation.tick()
        return [simulation.world.snapshot(), simulation.finish()]

    assert run() == run()


def test_the_soak_sums_itself_up_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ops", "500", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["changes"] >= 500
    assert out.count("\n") == 1
    assert "/500" in err  # the progress bar
