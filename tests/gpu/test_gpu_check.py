"""gpu-check itself, as far as it goes without a device: failed parts, the results file, and a rehearsal."""

import json
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from tests.gpu.__main__ import MACHINE, PARTS, _run_all
from tests.gpu.bundle import _requirements, install, without_weights
from tests.gpu.checks import Check, PartResult, read_checks, write_result
from tests.gpu.peer import Peer, PeerFailed
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
    path = tmp_path / "a.json"
    assert read_checks(path) == []
    write_result(path, PartResult("a", 1.0, [GOOD], "it has not ended"))
    write_result(path, PartResult("a", 1.0, [GOOD, FINDING], "it has not ended"))
    assert read_checks(path) == [GOOD, FINDING]
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_rehearsal_writes_a_file_and_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--dry", "--parts", "a", "--results", str(tmp_path)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    files = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(files) == {"m.json", "a.json"}
    assert {file["problem"] for file in files.values()} == {""}
    names = [check["name"] for check in files["a.json"]["checks"]]
    assert {"ipc_both_ways", "ipc_exporter_killed", "ipc_importer_killed", "ipc_stale_handle", "vmm_maker_killed"} <= set(names)
    assert "no parts failed" in done.stdout
    assert (tmp_path / "logs" / "a" / "part.log").exists()


def test_a_machine_that_will_not_do_stops_the_run_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--parts", "ab", "--results", str(tmp_path)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("this machine cannot run the checks: ")
    assert "no CUDA device is visible to torch" in done.stderr
    assert [path.name for path in tmp_path.glob("*.json")] == ["m.json"]


def run_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: dict[str, str], limit_s: int, seconds: float):
    """The parts of files in a folder, a module each; the machine's among them."""
    for name, text in modules.items():
        (tmp_path / f"stand_in_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{environment(tmp_path)['PYTHONPATH']}")
    parts = {name: (f"stand_in_{name}", limit_s, name) for name in modules}
    (tmp_path / "run_stand_ins.py").write_text(
        f"import tests.gpu.__main__ as main\nmain.PARTS.clear()\nmain.PARTS.update({parts})\n"
    )
    monkeypatch.setattr("tests.gpu.__main__.PARTS", parts)
    monkeypatch.setattr(
        "tests.gpu.__main__._COMMAND", [sys.executable, "-c", "import run_stand_ins; run_stand_ins.main.main()"]
    )
    (tmp_path / "logs").mkdir()
    return _run_all(list(modules), tmp_path, True, seconds)


OK = "from tests.gpu.checks import Check\ndef run(is_dry):\n    yield Check('fine', True)\n"


def test_a_part_that_hangs_is_killed_and_what_it_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = OK + "    import signal; signal.pause()\n"
    results, left = run_parts(tmp_path, monkeypatch, {MACHINE: OK, "a": hangs, "b": OK}, 8, 600)
    assert [(result.part, len(result.checks), result.problem) for result in results] == [
        (MACHINE, 1, ""), ("a", 1, "took longer than 8 s"), ("b", 1, "")]  # fmt: skip
    assert left == []


def test_a_part_that_breaks_says_so_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = OK + "    raise ValueError('as planned')\n"
    results, _ = run_parts(tmp_path, monkeypatch, {MACHINE: OK, "a": breaks, "b": OK}, 60, 600)
    assert results[1].problem == "ended with 1: ValueError: as planned"
    assert [len(result.checks) for result in results] == [1, 1, 1]


def test_parts_that_do_not_fit_the_time_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, left = run_parts(tmp_path, monkeypatch, {MACHINE: OK, "a": OK}, 60, 50)
    assert (results, left) == ([], [MACHINE, "a"])


def test_a_peer_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.gpu.peer.CALL_S", 0.0)
    with Peer(tmp_path) as peer, pytest.raises(PeerFailed, match="allocate gave no answer within 0 s"):
        peer.call("allocate", num_bytes=1)


def test_a_bundle_is_unpacked_without_pip_and_only_for_its_python(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    wheel = folder / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("thing/__init__.py", "")
        packed.writestr("thing/model.safetensors", "weights")
    without_weights(wheel)
    (folder / "python").write_text("{}.{}\n".format(*sys.version_info))
    install(folder, tmp_path / "site")
    assert [path.name for path in (tmp_path / "site" / "thing").iterdir()] == ["__init__.py"]
    (folder / "python").write_text("2.7\n")
    with pytest.raises(SystemExit, match=r"the bundle is for Python 2\.7"):
        install(folder, tmp_path / "site")


def test_every_part_exists() -> None:
    for module, limit_s, _ in PARTS.values():
        assert callable(import_module(module).run)
        assert limit_s > 0
    # Of the commands that docs/gpu.md names, each has ten minutes.
    for together in ("mab", "mgc", "mde"):
        assert sum(PARTS[name][1] for name in together) <= 9 * 60
    assert set("mabgcde") == set(PARTS)


def test_the_bundle_leaves_the_hosts_own_packages_alone() -> None:
    names = [requirement.split(">")[0].split("=")[0] for requirement in _requirements()]
    assert {"grpcio", "protobuf", "llguidance"} <= set(names)
    assert not {"torch", "triton", "numpy"} & set(names)
