"""`kvkeeper demo`, which is what a newcomer runs first: it shows what it says, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.processes.services import environment, short_folder

_LONG_S = 120.0


def _start(folder: Path) -> subprocess.Popen[str]:
    env = {**environment(folder), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "kvkeeper.cli", "demo"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name the folder, which every service of the demo does."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            if str(folder) in line:
                found.append(line)
    return found


def test_demo_shows_what_it_says_and_leaves_nothing() -> None:
    with short_folder() as folder:
        demo = _start(folder)
        output, _ = demo.communicate(timeout=_LONG_S)
        assert demo.returncode == 0, output
        assert not _processes_of(folder)
        assert not list(folder.glob("kvkeeper-demo-*"))
    assert "Traceback" not in output
    assert "drain_timeout" not in output, "no service waits for another one in vain"
    cold, warm, forked, again, kept = re.split(r"\n\d\. ", output)[1:6]
    assert re.search(r"wrap_all +\d+ +0 +24", cold), "nothing is cached at first"
    for part in (warm, again, kept):
        rows = re.findall(r"^ +\w+ +(\d+) +(\d+) +24 ", part, re.MULTILINE)
        assert len(rows) == 6
        assert all(int(cached) > 0.9 * int(prompt) for prompt, cached in rows)
    assert int(re.findall(r"could part: (\d+)", forked)[0]) >= 1
    assert "SIGKILL" in forked
    assert "Killing the cache service with SIGKILL" in again
    assert kept.count("the answers are word for word the same") == 2
    blocks, free, cached, in_use = (
        int(re.findall(rf"^ +{name} +([\d,]+)", output, re.MULTILINE)[-1].replace(",", ""))
        for name in ("blocks", "free", "cached", "in use")
    )
    assert (free + cached, in_use) == (blocks, 0), "every block of the pool is accounted for"


def test_interrupted_demo_leaves_nothing() -> None:
    with short_folder() as folder:
        demo = _start(folder)
        assert demo.stdout is not None
        while "1. One prompt" not in demo.stdout.readline():  # both services run by then
            assert demo.poll() is None
        assert _processes_of(folder)
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=_LONG_S)
        assert demo.returncode == 130, output
        assert not _processes_of(folder)
        assert not list(folder.glob("kvkeeper-demo-*"))


def test_demo_that_loses_its_engine_says_so_and_leaves_nothing() -> None:
    with short_folder() as folder:
        demo = _start(folder)
        assert demo.stdout is not None
        while "1. One prompt" not in demo.stdout.readline():  # an engine computes from here on
            assert demo.poll() is None
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        (engine,) = (pid for pid in children if b"\0engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(engine), signal.SIGKILL)
        output, _ = demo.communicate(timeout=_LONG_S)
        assert demo.returncode == 1, output
        assert output.splitlines()[-1].startswith("kvkeeper: the demo could not go on: "), output
        assert not _processes_of(folder)
        assert not list(folder.glob("kvkeeper-demo-*"))
