"""The cases of part b in processes of their own, side by side, because nearly all of their time is Triton's compiler.

A process ends where a case has lost the device (an illegal address) or has ended the process. Another one then continues behind
that case, which is the one that failed. `python -m tests.gpu.kernel_workers SHARE SHARES FIRST [dry]` is such a process: it
takes the cases from number FIRST on whose number modulo SHARES is SHARE, and writes two JSON lines for each.
"""

import faulthandler
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict

from tests.gpu.checks import Check

NUM_WORKERS = 8  # each with its share of the processors, or the threads of their references wait for each other
_COMMAND = (sys.executable, "-m", "tests.gpu.kernel_workers")
_LOST = 3  # the exit code of a process whose device is lost


def run_cases(is_dry: bool) -> Iterator[Check]:
    """The checks of all cases, as they come. A rehearsal has one process."""
    shares = 1 if is_dry else NUM_WORKERS
    found: queue.SimpleQueue[Check | None] = queue.SimpleQueue()
    for share in range(shares):
        threading.Thread(target=_watch, args=(share, shares, is_dry, found.put), daemon=True).start()
    for _ in range(shares):
        while (check := found.get()) is not None:
            yield check


def _watch(share: int, shares: int, is_dry: bool, put: Callable[[Check | None], None]) -> None:
    """All cases of a share, in as many processes as it takes; None at the end."""
    first = 0
    while True:
        command = [*_COMMAND, str(share), str(shares), str(first), *(["dry"] if is_dry else [])]
        threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // shares, 1))}
        begun = ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**threads, **os.environ}) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                message = json.loads(line)
                if "check" in message:
                    put(Check(**message["check"]))
                    begun = ""
                else:
                    begun, first = message["name"], message["number"] + 1
        code = worker.returncode
        if begun:
            put(Check(begun, False, note=f"its process ended with {code}; the log of the part has the reason"))
        elif code != _LOST:
            break
    if code:
        put(Check(f"worker_{share}", False, note=f"ended with {code} between two cases; the log of the part has the reason"))
    put(None)


def _work(share: int, shares: int, first: int, is_dry: bool) -> int:
    from tests.gpu import part_kernels  # it imports torch, which the process that watches does without

    faulthandler.enable()
    for number, (name, measure) in enumerate(part_kernels.all_cases(is_dry)):
        if number % shares != share or number < first:
            continue
        print(json.dumps({"number": number, "name": name}), flush=True)
        check = measure()
        print(json.dumps({"check": asdict(check)}), flush=True)
        if check.ok is False and not is_dry and part_kernels.is_device_lost():
            return _LOST
    return 0


if __name__ == "__main__":
    share, shares, first = (int(word) for word in sys.argv[1:4])
    sys.exit(_work(share, shares, first, "dry" in sys.argv))
