"""A service that tells what code it comes by: `python -m tests.support.processes.audited_process MODULE FLAG...`.

From its log's "ready" on, one line on stderr in the form of the log for each thing that Python's audit hooks see and that data
could cause: {"event": "audited", "kind": ..., "what": ...}. Code of a source file that is imported is not told.
"""

import json
import os
import runpy
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any

from kvkeeper.common.service.output import QueuedStream

AUDITED = "audited"  # the event
_KINDS = frozenset(
    {"exec", "compile", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn",
     "os.spawn", "ctypes.dlopen", "cpython.run_command", "code.__new__"}
)  # fmt: skip


class Audit:
    """Told by hooks once the service is ready."""

    def __init__(self) -> None:
        self._is_ready = False
        write = QueuedStream.write  # by which a service's log goes

        def see(stream: QueuedStream, text: str) -> int:
            self._is_ready |= '"event": "ready"' in text
            return write(stream, text)

        QueuedStream.write = see  # type: ignore[method-assign]

    def hook(self, kind: str, args: tuple[Any, ...]) -> None:
        if not self._is_ready or kind not in _KINDS or _is_import(kind, args):
            return
        what = " ".join(map(str, args[1])) if kind == "subprocess.Popen" else str(args[:2])
        os.write(2, json.dumps({"event": AUDITED, "kind": kind, "what": what}).encode() + b"\n")


def _is_import(kind: str, args: tuple[Any, ...]) -> bool:
    """The body of a module or its source; or a text that is parsed alone, by ast.parse."""
    if kind == "exec":
        return isinstance(args[0], CodeType) and os.path.isfile(args[0].co_filename)
    return kind == "compile" and isinstance(args[1], str) and (args[1] == "<unknown>" or os.path.isfile(args[1]))


def main(argv: Sequence[str]) -> None:
    module, *flags = argv
    sys.argv = [module, *flags]
    sys.addaudithook(Audit().hook)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
