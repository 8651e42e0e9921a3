"""The failpoints themselves: each await has its two, one that fires does as it is told, and a history tells what is wrong."""

import ast
import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.failpoints.board import Action, Armed, Board
from tests.support.failpoints.points import AROUND, HIT, HIT_LATER, all_points, instrumented, sources
from tests.support.failpoints.process import Failpoints
from tests.support.processes.history import Event, What, violations

TOKENS = (5, 6, 7, 8)
PROMPT = (1, 2, 3, 4)


# -- points


def test_every_await_of_both_services_has_its_two_points() -> None:
    points = all_points()
    assert [point.number for point in points] == list(range(len(points)))
    num_awaits = sum(
        isinstance(node, ast.Await) for path in sources().values() for node in ast.walk(ast.parse(path.read_bytes()))
    )
    assert num_awaits > 200
    assert sum(" behind await" in point.name for point in points) == num_awaits
    assert sum(" before await" in point.name and point.is_async for point in points) == num_awaits


def test_every_statement_of_a_file_that_writes_has_a_point() -> None:
    source = b"def f(a):\n    'says'\n    if a:\n        a = 2\n    else:\n        a = 3\n    return a\n"
    tree, points = instrumented(source, "cache_service/memory/kept/index_file.py", 10)
    line_of = {point.number: point.line for point in points}
    assert sorted(line_of.values()) == [3, 4, 6, 7]
    passed: list[int] = []
    names = {HIT: passed.append}
    exec(compile(tree, "f", "exec"), names)
    assert names["f"](1) == 2
    assert [line_of[number] for number in passed] == [3, 4, 7]


async def test_an_instrumented_file_does_what_it_did(tmp_path: Path) -> None:
    source = (
        b"import asyncio\n"
        b"async def each(n):\n    for i in range(n):\n        await asyncio.sleep(0)\n        yield i\n"
        b"async def f(n):\n    found = []\n    async with asyncio.timeout(9):\n        async for i in each(n):\n"
        b"            found.append(await asyncio.sleep(0, i))\n    return found\n"
    )
    tree, points = instrumented(source, "any.py", 0)
    board = Board(tmp_path / "board", len(points))
    names = Failpoints(board).functions()
    assert set(names) == {HIT, HIT_LATER, AROUND}
    exec(compile(tree, "f", "exec"), names)
    assert await names["f"](3) == [0, 1, 2]
    by_place = {point.name.split(") ")[1]: int(board.counts[point.number]) for point in points}
    assert by_place == {
        "before await asyncio.sleep(0)": 3, "behind await asyncio.sleep(0)": 3,
        "before await asyncio.sleep(0, i)": 3, "behind await asyncio.sleep(0, i)": 3,
        "in async for i": 3, "in async with asyncio.timeout(9)": 1,
    }  # fmt: skip


# -- the board


def test_an_armed_point_fires_once_after_its_passes(tmp_path: Path) -> None:
    board, other = Board(tmp_path / "board", 3), Board(tmp_path / "board")
    other.arm(Armed(1, Action.DELAY, num_passes=1, seconds=0.5))
    assert [board.passed(point) for point in (0, 1, 2)] == [None] * 3
    assert board.passed(1) == Armed(1, Action.DELAY, 0, 0.5)
    assert board.passed(1) is None
    assert other.passed_points() == [0, 1, 2]
    assert not other.disarm(), "it has fired"


def test_a_disarmed_point_does_not_fire(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 1)
    board.arm(Armed(0, Action.KILL))
    assert board.disarm()
    assert board.passed(0) is None


# -- what a fired point does


_AWAITS = """
import asyncio
async def f():
    await asyncio.sleep(0)
    print("went on", flush=True)
"""
_RUNS = """
import asyncio, sys
from pathlib import Path
from tests.support.failpoints.board import Board
from tests.support.failpoints.points import instrumented
from tests.support.failpoints.process import Failpoints
names = Failpoints(Board(Path(sys.argv[1]))).functions()
exec(compile(instrumented(sys.argv[2].encode(), "f.py", 0)[0], "f.py", "exec"), names)
asyncio.run(names["f"]())
"""


async def _process(tmp_path: Path, action: Action, seconds: float = 0.0) -> asyncio.subprocess.Process:
    """One with one await, and the point before that armed."""
    board = Board(tmp_path / "board", 2)
    board.arm(Armed(0, action, 0, seconds))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", _RUNS, str(board.path), _AWAITS, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_a_kill_ends_the_process_there(tmp_path: Path) -> None:
    process = await _process(tmp_path, Action.KILL)
    said, log = await process.communicate()
    assert (process.returncode, said) == (-signal.SIGKILL, b"")
    assert b'"event": "failpoint"' in log


async def test_a_stopped_process_goes_on_when_it_is_told(tmp_path: Path) -> None:
    process = await _process(tmp_path, Action.STOP)
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
    process.send_signal(signal.SIGCONT)
    said, _ = await process.communicate()
    assert (process.returncode, said) == (0, b"went on\n")


async def test_a_delay_ends_by_itself(tmp_path: Path) -> None:
    process = await _process(tmp_path, Action.DELAY, 0.01)
    said, log = await process.communicate()
    assert (process.returncode, said) == (0, b"went on\n")
    assert b"DELAY" in log


# -- histories


def oracle(prompt: tuple[int, ...]) -> list[int]:
    return [prompt[0] + 4 + place for place in range(8)]


def asked(name: str = "a", tenant: str = "t", prompt: tuple[int, ...] = PROMPT, num_outputs: int = 1) -> Event:
    return Event(What.ASKED, name, tenant, prompt, num_outputs=num_outputs, num_tokens=4)


def came(*tokens: int, name: str = "a", index: int = 0) -> Event:
    return Event(What.TOKENS, name, tokens=tokens, index=index)


def ended(name: str = "a", what: What = What.COMPLETED, num_cached: int = 0) -> Event:
    return Event(what, name, num_cached=num_cached)


RIGHT = [asked(), came(5, 6), came(7, 8), ended()]


@pytest.mark.parametrize(
    "history",
    [
        RIGHT,
        [asked(num_outputs=2), came(5, 6), came(*TOKENS, index=1), came(7, 8), ended()],
        [asked(), ended(what=What.REFUSED)],
        [asked(), came(5), Event(What.FAULT, "a"), ended(what=What.CUT)],
        [*RIGHT, asked("b"), came(*TOKENS, name="b"), ended("b", num_cached=4)],
        [asked(), Event(What.FAULT, "a"), came(*TOKENS), ended(num_cached=4)],
    ],
    ids=["right", "two outputs", "refused", "cut by a fault", "cached by its tenant", "cached by itself before a fault"],
)
def test_a_history_that_may_be(history: list[Event]) -> None:
    assert violations(history, oracle, block_size=4) == []


@pytest.mark.parametrize(
    ("history", "told"),
    [
        ([asked(), came(5, 7), came(7, 8), ended()], "not [5, 6]"),
        ([asked(), came(5, 6), came(6, 7, 8), ended()], "at 2"),
        ([asked(), came(5, 6), ended()], "ended with [2] of 4"),
        ([asked(), came(*TOKENS, 9), ended()], "ended with [5] of 4"),
        ([asked(), came(*TOKENS)], "never ended"),
        ([*RIGHT, came(9)], "behind its end"),
        ([*RIGHT, ended()], "behind its end"),
        ([asked(), came(5), ended(what=What.CUT)], "nothing had been broken"),
        ([asked(), came(5), ended(what=What.REFUSED)], "refused when tokens"),
        ([*RIGHT, asked()], "asked twice"),
        ([came(5)], "never asked"),
        ([*RIGHT, asked("b", "other"), came(*TOKENS, name="b"), ended("b", num_cached=4)], "4 cached tokens"),
        ([*RIGHT, asked("b", prompt=(1, 2, 3, 9)), came(*TOKENS, name="b"), ended("b", num_cached=4)], "4 cached tokens"),
    ],
)  # fmt: skip
def test_a_history_that_cannot_be(history: list[Event], told: str) -> None:
    (found, *_) = violations(history, oracle, block_size=4)
    assert told in found
