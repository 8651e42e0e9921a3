"""Row 34: malformed input never ends a service, nor makes it take itself for broken.

Each unit is a process of fuzz_target.py with a seed of its own, fed by atheris, which mutates what reached new code. The input
that broke something is told in base 64; from a file, `python -m tests.soak.fuzz_target SERVICE FOLDER -runs=1 FILE` replays it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.soak.row import Counts

# Of an input, of a call, and of the process, whose other half is torch and the collector of coverage.
_LIMITS = ("-max_len=4096", "-timeout=20", "-rss_limit_mb=1024")
# The peak of a process that is started counts the memory of the one that started it, here that of all tests before. A shell in
# between has little; the second command keeps it from becoming the process itself.
FROM_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")
_MOST_TOLD = 4000  # characters of what atheris printed


def run(seed: int, service: str, num_runs: int) -> Counts:
    """Counts calls; the fault is an input that was refused. Raises AssertionError with the end of what atheris printed."""
    with tempfile.TemporaryDirectory(prefix="kvkeeper-fuzz-") as folder:
        target = [*FROM_SHELL, sys.executable, "-m", "tests.soak.fuzz_target", service, folder]
        command = [*target, f"-runs={num_runs}", f"-seed={seed + 1}", *_LIMITS]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-_MOST_TOLD:]
        told = json.loads((Path(folder) / "counts").read_text())
    return Counts(told["num_calls"], told["num_refused"])
