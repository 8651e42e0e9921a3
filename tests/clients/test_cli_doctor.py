"""`kvkeeper doctor` says what this host lacks, with the mend, in the words of the services' own checks."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cli import main
from kvkeeper.cli.start import host
from tests.support.processes.services import environment, free_ports


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Addresses that are free, whatever runs on this machine."""
    path = tmp_path / "kvkeeper.toml"
    cache, engine = free_ports()[:2]
    path.write_text(f'[cache]\nlisten = "{cache}"\npool-memory = "64MiB"\n[engine]\nlisten = "{engine}"\n')
    return str(path)


def examined(config: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the findings by what was looked at."""
    exit_code = main(["doctor", "--config", config, "--json"])
    return exit_code, {each["what"]: each for each in json.loads(capsys.readouterr().out)["findings"]}


def fail(*_: Any) -> Any:
    raise PermissionError(1, "Operation not permitted")


def test_nothing_is_wrong_where_the_tests_run(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, found = examined(config, capsys)
    assert (exit_code, [each for each in found.values() if each["state"] == "wrong"]) == (0, [])
    assert all(each["mend"] for each in found.values() if each["state"] != "ok"), "each thing that is missing has a mend"
    assert main(["doctor", "--config", config]) == 0
    assert capsys.readouterr().out.endswith("the services can start here\n")


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (os, "memfd_create", "shared memory"),
        (os, "pidfd_open", "ends of processes"),
        (socket, "send_fds", "peers and descriptors on sockets"),
    ],
)
def test_what_the_kernel_refuses_is_wrong(
    owner: Any, name: str, what: str, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        exit_code, found = examined(config, capsys)
    assert exit_code == 1
    assert found[what]["state"] == "wrong"
    assert found[what]["found"].endswith("Operation not permitted")
    assert [each["what"] for each in found.values() if each["state"] == "wrong"] == [what]


def test_what_is_not_installed_has_its_command(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (("engine packages", True, ("no_such_module",), "engine"), ("kernels", False, ("no_such_kernels",), "cpu"))
    monkeypatch.setattr(host, "PARTS", parts)
    exit_code, found = examined(config, capsys)
    assert (exit_code, found["engine packages"]["state"], found["kernels"]["state"]) == (1, "wrong", "note")
    assert found["engine packages"]["found"] == "no_such_module not installed"
    assert "[engine]" in found["engine packages"]["mend"] and "[cpu]" in found["kernels"]["mend"]


def test_settings_are_checked_as_the_services_check_them(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    what = "settings, addresses, model, memory"
    Path(config).write_text('[engine]\nmodel = "/nope"\n[cache]\nlisten = "127.0.0.1:0"\n')
    exit_code, found = examined(config, capsys)
    assert (exit_code, found[what]["state"]) == (1, "wrong")
    assert found[what]["found"].startswith("--model /nope: there is no such folder")
    with socket.create_server(("127.0.0.1", 0)) as other:
        Path(config).write_text(f'[cache]\nlisten = "127.0.0.1:{other.getsockname()[1]}"\n')
        exit_code, found = examined(config, capsys)
    assert "another program listens" in found[what]["found"]
    assert found[what]["mend"] == "where kvkeeper runs already: kvkeeper status"


def test_limits_of_the_process_are_told() -> None:
    """In a process of its own, whose limits are lowered."""
    code = (
        "import resource\n"
        "from kvkeeper.cli.start import host\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "for look in (host.open_files, host.locked_memory):\n"
        "    try:\n"
        "        print(look())\n"
        "    except host.Lacking as lacking:\n"
        "        print('lacking', lacking)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "lacking at most 100, and 2048 let 1,024 clients connect",
        "lacking at most 1 MiB can be pinned for copies to a device",
    ]


def test_a_folder_that_is_no_tmpfs_is_told(tmp_path: Path) -> None:
    with pytest.raises(host.Lacking, match="No such file or directory"):
        host.tmpfs(tmp_path / "nothing")
    with pytest.raises(host.Lacking, match="/proc lies on proc"):
        host.tmpfs(Path("/proc"))


def test_it_does_not_import_torch_and_leaves_nothing_open(folder: Path, config: str) -> None:
    code = (
        "import os, sys; from kvkeeper.cli import main\n"
        "before = os.listdir('/proc/self/fd'); main(['doctor', '--config', sys.argv[1], '--json'])\n"
        "print('torch' in sys.modules, os.listdir('/proc/self/fd') == before)"
    )
    command = [sys.executable, "-c", code, config]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False True"


def test_a_file_limit_without_bound_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert host.open_files() == host.locked_memory() == "no limit"
