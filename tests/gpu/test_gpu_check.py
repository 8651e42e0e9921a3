"""gpu-check itself, as far as it goes without a device: failed parts, the results file, and a rehearsal."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.gpu.__main__ import PARTS
from tests.gpu.bundle import _requirements
from tests.gpu.checks import Check, PartResult, read_checks, write_checks
from tests.support.processes.services import environment

GOOD, FINDING, BAD = Check("a", True, {"ms": 1.5}), Check("b", None, note="told"), Check("c", False)


@pytest.mark.parametrize(
    ("checks", "problem", "is_good"),
    [
        ([GOOD, FINDING], "", True),
        ([GOOD, BAD], "", False),
        ([GOOD], "took longer than 60 s", False),
        ([], "", False),  # a part that found nothing has not run
    ],
)
def test_the_checks_that_make_a_part_fail(checks: list[Check], problem: str, is_good: bool) -> None:
    assert PartResult("x", 1.0, checks, problem).is_good is is_good


def test_checks_of_a_part_before_it_broke_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "checks"
    assert read_checks(path) == []
    write_checks(path, [GOOD])
    write_checks(path, [FINDING])
    path.write_text(path.read_text() + '{"name": "cut o')
    assert read_checks(path) == [GOOD, FINDING]


def test_a_rehearsal_writes_a_file_and_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--dry", "--parts", "a", "--results", str(tmp_path)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = tmp_path.glob("rehearsal-*.json")
    content = json.loads(path.read_text())
    names = [check["name"] for check in content["parts"]["a"]["checks"]]
    assert {"ipc_both_ways", "ipc_exporter_killed", "ipc_importer_killed", "ipc_stale_handle", "vmm_maker_killed"} <= set(names)
    assert "no parts failed" in done.stdout


def test_every_part_exists() -> None:
    for module, limit_s, _ in PARTS.values():
        assert callable(import_module(module).run)
        assert limit_s > 0
    assert sum(limit_s for _, limit_s, _ in PARTS.values()) <= 9 * 60


def test_the_bundle_leaves_the_hosts_own_packages_alone() -> None:
    names = [requirement.split(">")[0].split("=")[0] for requirement in _requirements()]
    assert {"grpcio", "protobuf", "llguidance", "cuda-bindings"} <= set(names)
    assert not {"torch", "triton", "numpy"} & set(names)
