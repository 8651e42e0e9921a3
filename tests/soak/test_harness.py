"""The soak itself: it goes on where it stopped, calls nothing a pass that is not, and outlives units that hang or crash."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import structlog

from tests.soak import __main__ as soak
from tests.soak import rows
from tests.soak.fuzzing import FROM_SHELL
from tests.soak.progress import SoakState, table
from tests.soak.row import Row
from tests.support.processes.fleet import Service
from tests.support.processes.soak_units import unit


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A seed that is replayed in this process makes its log quiet."""
    yield
    structlog.reset_defaults()


def make_row(folder: Path, *, target: int = 40, broken: int = -1, faults: int = 1, number: int = 1, most_s: float = 30) -> Row:
    run = partial(unit, str(folder), broken, faults)
    return Row(number, "unit", "it holds", "things", "faults", target, run, num_ci_seeds=1, most_seconds=most_s)


def state_of(folder: Path) -> SoakState:
    return SoakState(folder / "state.json")


def run(folder: Path, row: Row, *, num_workers: int = 1) -> SoakState:
    """To the end: until the row has passed or failed."""
    state = state_of(folder)
    soak.Soak([row], state, "r1", num_workers).run(lambda: False, lambda outcome: None)
    return state


def test_a_row_runs_until_its_target_is_reached(tmp_path: Path) -> None:
    row = make_row(tmp_path)
    progress = run(tmp_path, row, num_workers=2).of(row)
    assert progress.status(row) == "PASS"
    assert progress.done >= 40
    assert progress.revisions == ["r1"]


def test_a_soak_goes_on_where_it_stopped(tmp_path: Path) -> None:
    row = make_row(tmp_path)
    state = state_of(tmp_path)
    soak.Soak([row], state, "r1", 1).run(lambda: state.of(row).done >= 20, lambda outcome: None)
    assert (state.of(row).done, state.of(row).status(row)) == (20, "unfinished")
    assert "unfinished" in table([row], state)
    assert run(tmp_path, row).of(row).status(row) == "PASS"
    assert (tmp_path / "ran").read_text().split() == ["0", "1", "2", "3"]


def test_what_never_fired_is_no_pass(tmp_path: Path) -> None:
    row = make_row(tmp_path, faults=0)
    state = state_of(tmp_path)
    soak.Soak([row], state, "r1", 1).run(lambda: state.of(row).next_seed >= 6, lambda outcome: None)
    assert (state.of(row).done, state.of(row).status(row)) == (0, "unfinished")


def test_a_violation_is_named_by_its_seed_and_stays_until_the_seed_holds(tmp_path: Path) -> None:
    row = make_row(tmp_path, broken=2)
    state = run(tmp_path, row)
    assert state.of(row).status(row) == "FAILED seed 2"
    assert run(tmp_path, row).of(row).failing_seeds == [2]
    (tmp_path / "repaired").touch()
    assert run(tmp_path, row).of(row).status(row) == "PASS"


@pytest.mark.parametrize("seed", [50, 60])
def test_a_unit_that_hangs_or_dies_is_a_violation(tmp_path: Path, seed: int) -> None:
    row = make_row(tmp_path, most_s=0.5)
    state = state_of(tmp_path)
    state.of(row).next_seed = seed
    soak.Soak([row], state, "r1", 1).run(lambda: False, lambda outcome: None)
    assert state.of(row).status(row) == f"FAILED seed {seed}"


def test_the_command_prints_a_table_and_its_exit_code_tells_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "ROWS", [make_row(tmp_path), make_row(tmp_path, broken=4, number=2)])
    flags = ["--state", str(tmp_path / "state.json"), "--minutes", "1"]
    assert soak.main([*flags, "--rows", "1"]) == 0
    out, err = capsys.readouterr()
    assert "PASS" in out
    assert "100%" in err or "/60 s" in err  # the progress bar
    monkeypatch.setattr(soak, "ROWS", [make_row(tmp_path, target=100, broken=4, number=2)])
    assert soak.main([*flags, "--json"]) == 1
    out, err = capsys.readouterr()
    (shown,) = json.loads(out)
    assert (shown["status"], shown["row"]) == ("FAILED seed 4", 2)
    assert "make soak ROWS=2 SEED=4" in err
    with pytest.raises(AssertionError, match="the promise is broken"):
        soak.main(["--rows", "2", "--seed", "4"])
    with pytest.raises(SystemExit):
        soak.main(["--rows", "99"])


def test_the_rows_have_names_for_a_command_line() -> None:
    assert all(row.target > 0 and row.unit and row.fault for row in rows.ROWS)


# -- processes that are started


async def test_a_service_that_has_ended_before_its_log_is_read_has_said_everything() -> None:
    """Its process is gone from /proc when the first line is read."""
    says = 'import sys; print(\'{"event": "ready"}\', \'{"event": "failpoint"}\', sep=\'\\n\', file=sys.stderr)'
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", says, stderr=asyncio.subprocess.PIPE)
    await process.wait()
    service = Service(process)
    await service.end()
    assert service.events == {"ready": 1, "failpoint": 1}
    assert "has ended with 0" in service.tail


def test_the_memory_of_the_tests_is_not_that_of_a_fuzzed_process() -> None:
    ballast = b"x" * (256 << 20)
    tells = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"
    peak = subprocess.run([*FROM_SHELL, sys.executable, "-c", tells], capture_output=True, text=True, check=True).stdout
    assert int(peak) < len(ballast) >> 20


def test_a_fuzzed_process_that_fails_is_seen() -> None:
    ended = subprocess.run([*FROM_SHELL, sys.executable, "-c", "raise SystemExit(77)"], check=False)
    assert ended.returncode == 77
