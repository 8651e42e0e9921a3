"""A system that is measured: a process that takes a job a line on its standard input, and answers each with a line.

The first line on its standard output says that it is ready: {} or {"ready_s": seconds}, where not all of the time since its
start is the system's. A job is {"prompts": [[token ids]], "num_new": n}; its answer has a list for each prompt: {"times":
[[when chunks came, in seconds from the request]], "tokens": [[token ids]]}.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.workloads import Job

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
END_S = 60.0


class Ended(Exception):
    """A system's process ended where it should not. The text has the end of its log."""


@dataclass(frozen=True, slots=True)
class System:
    """name, kind: of the table. environment: of the process, beside ours."""

    name: str
    kind: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    shares_prefixes: bool = True


class Running:
    """A system's process, which is ready. Raises Ended."""

    def __init__(self, system: System, log: Path) -> None:
        self.system, self._log = system, log
        begin = time.perf_counter()
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                system.command, env={**os.environ, **system.environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=stderr, text=True,
            )  # fmt: skip
        self.ready_s: float = self._read().get("ready_s", time.perf_counter() - begin)

    def ask(self, job: Job) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(asdict(job)), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def end(self) -> None:
        """Lets it end by itself, so that its own processes end with it."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> Ended:
        with self._process:
            self._process.kill()
        return Ended(f"{self.system.name} ended: {self._log.read_text()[-2000:]}")


_KVKEEPER_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8", "auto": "auto"}
_VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_LLAMA_KINDS = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0"}
KINDS = tuple(_KVKEEPER_DTYPES)


def kvkeeper(name: str, kind: str, model: Path, tree: Path | None = None) -> System:
    """tree: another checkout, which has a virtual environment."""
    python = str(tree / ".venv" / "bin" / "python") if tree else sys.executable
    command = [python, "-P", str(HERE / "kvkeeper_process.py"), str(model), _KVKEEPER_DTYPES[kind]]
    return System(name, kind, command, {"PYTHONPATH": str(tree or ROOT)})


def vllm(kind: str, model: Path, python: Path) -> System | None:
    """None where it has no such numbers."""
    if kind not in _VLLM_DTYPES:
        return None
    # Its manual's advice: OpenMP of Intel's, tcmalloc where there is one, and no processor kept free where there are two.
    library = python.parents[1] / "lib"
    preloaded = [str(path) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so") if (path := library / name).exists()]
    environment = {
        "LD_PRELOAD": ":".join(preloaded),
        "PYTHONPATH": "",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(python), "-P", str(HERE / "vllm_process.py"), str(model), _VLLM_DTYPES[kind]]
    return System("vLLM", kind, command, environment)


def llama_cpp(kind: str, model: Path, folder: Path, num_threads: int) -> System | None:
    """folder: its environment. Writes its form of the model beside the model. None where it has no such numbers."""
    if kind not in _LLAMA_KINDS:
        return None
    written = model.with_name(f"{model.name}-{_LLAMA_KINDS[kind]}.gguf")
    if not written.exists():
        unfinished = written.with_suffix(".unfinished")
        writer = [sys.executable, "-P", str(HERE / "write_gguf.py"), str(model), _LLAMA_KINDS[kind], str(unfinished)]
        subprocess.run(writer, env={**os.environ, "PYTHONPATH": str(folder / "python")}, check=True)
        unfinished.rename(written)
    command = ["node", str(HERE / "llama_process.mjs"), str(folder), str(written), str(num_threads)]
    return System("llama.cpp", kind, command, shares_prefixes=False)
