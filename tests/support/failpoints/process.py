"""A service as a process with failpoints: `python -m tests.support.failpoints.process BOARD CODE MODULE FLAG...`.

Its modules are loaded with a call at each failpoint, from the file CODE (points.py); the board (board.py) says which one fires.
Before it does, one line on stderr tells so, in the form of the log: {"event": "failpoint"}.
"""

import asyncio
import importlib.abc
import importlib.machinery
import json
import marshal
import os
import runpy
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from tests.support.failpoints.board import Action, Armed, Board
from tests.support.failpoints.points import AROUND, HIT, HIT_LATER, read_code

T = TypeVar("T")
FIRED = "failpoint"  # the event


class Failpoints:
    """The functions that instrumented modules call."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def hit(self, point: int) -> None:
        """At a statement."""
        if (armed := self._board.passed(point)) is not None and not _fire(armed):
            time.sleep(armed.seconds)

    async def hit_later(self, point: int) -> None:
        """At an await."""
        if (armed := self._board.passed(point)) is not None and not _fire(armed):
            await asyncio.sleep(armed.seconds)

    async def around(self, awaited: Awaitable[T], before: int, behind: int) -> T:
        """An await with the points on its two sides. What was awaited runs to its end also when the delay is cancelled."""
        try:
            await self.hit_later(before)
        except BaseException:
            _abandon(awaited)
            raise
        result = await awaited
        await self.hit_later(behind)
        return result

    def functions(self) -> dict[str, Any]:
        return {HIT: self.hit, HIT_LATER: self.hit_later, AROUND: self.around}


def _fire(armed: Armed) -> bool:
    """Whether all is done: a delay is the caller's."""
    line = {"event": FIRED, "point": armed.point, "action": armed.action.name}
    os.write(2, json.dumps(line).encode() + b"\n")
    if armed.action is Action.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed.action is Action.STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    return armed.action is not Action.DELAY


def _abandon(awaited: Awaitable[Any]) -> None:
    """As if the await had been cancelled at once."""
    if isinstance(awaited, asyncio.Future):
        awaited.cancel()
    elif hasattr(awaited, "close"):
        awaited.close()


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with its failpoints. No bytecode that lies beside it is believed."""

    def __init__(self, fullname: str, path: str, code: bytes, functions: dict[str, Any]) -> None:
        super().__init__(fullname, path)
        self._code, self._functions = code, functions

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = marshal.loads(self._code)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._functions)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and changes the loader of the modules that have failpoints."""

    def __init__(self, code: dict[str, bytes], functions: dict[str, Any]) -> None:
        self._code, self._functions = code, functions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or (spec := finder.find_spec(fullname, path, target)) is None:
                continue
            if spec.origin in self._code:
                spec.loader = _Loader(fullname, spec.origin, self._code[spec.origin], self._functions)
            return spec
        return None


def main(argv: Sequence[str]) -> None:
    board, code, module, *flags = argv
    failpoints = Failpoints(Board(Path(board))).functions()
    for name in [name for name in sys.modules if name.startswith(("kvkeeper.cache_service.", "kvkeeper.engine_service."))]:
        del sys.modules[name]  # points.py has imported the packages
    sys.meta_path.insert(0, _Finder(read_code(Path(code)), failpoints))
    sys.argv = [module, *flags]
    runpy.run_module(module, init_globals=failpoints, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
