"""The first epoch of a run is larger than those of the runs before it, whatever was done to the clock."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from kvkeeper.cache_service.memory import first_epoch as module
from kvkeeper.cache_service.memory.first_epoch import FILE, first_epoch

HOUR = 3600 * 10**6  # microseconds
NOW = 1_764_000_000 * 10**6


class Machine:
    """Its clocks, in microseconds, and its boot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.wall, self.since_boot = NOW, 5 * HOUR
        self.boot_id = folder / "boot_id"
        self.boot_id.write_text("a" * 36 + "\n")
        monkeypatch.setattr(time, "time_ns", lambda: self.wall * 1000)
        monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: self.since_boot * 1000)
        monkeypatch.setattr(module, "_BOOT_ID", self.boot_id)

    def run(self, microseconds: int) -> None:
        self.wall += microseconds
        self.since_boot += microseconds

    def boot(self) -> None:
        self.since_boot = 7
        self.boot_id.write_text("b" * 36 + "\n")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_it_is_the_time_as_long_as_the_clock_is_right(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(5):
        assert first_epoch(folder) == machine.wall
        machine.run(HOUR)
    machine.boot()
    machine.run(HOUR)
    assert first_epoch(folder) == machine.wall
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_a_clock_that_is_set_back_takes_it_on_by_the_time_that_has_passed(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert first_epoch(folder) == NOW
    for number in range(1, 4):
        machine.run(11)
        machine.wall -= 2 * HOUR
        assert first_epoch(folder) == NOW + 11 * number


def test_a_boot_with_a_clock_that_is_set_back_is_behind_all_that_a_run_could_open(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = first_epoch(folder)
    machine.boot()
    machine.wall -= 24 * HOUR
    second = first_epoch(folder)
    assert second == first + (1 << 32)
    machine.run(3)
    assert first_epoch(folder) == second + 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"9" * 300),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    ],
    ids=["empty", "long", "cut", "link"],
)
def test_a_file_that_says_nothing_leaves_the_clock(damage: Callable[[Path], object], machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first_epoch(folder)
    damage(folder / FILE)
    machine.run(5)
    assert first_epoch(folder) == machine.wall
    machine.wall -= HOUR
    assert first_epoch(folder) == machine.wall + HOUR, "it is written anew"


def test_a_file_that_cannot_be_written_is_told_and_stays_as_it_was(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    first_epoch(folder)
    kept = (folder / FILE).read_bytes()
    machine.run(5)
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(module.os, "write", lambda descriptor, line: 3)
        assert first_epoch(folder) == machine.wall
    assert logs == [{"event": "epoch_not_kept", "why": os.strerror(errno.ENOSPC), "log_level": "warning"}]
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [(FILE, kept)]


def test_a_system_that_does_not_tell_its_boot_is_no_fault(machine: Machine, tmp_path: Path) -> None:
    machine.boot_id.unlink()
    first = first_epoch(tmp_path / "run")
    machine.run(5)
    machine.wall -= HOUR
    assert first_epoch(tmp_path / "run") == first + 5
