"""Compile the launches of the wrappers for sm_90, without a device, and read the machine code.

Run as a process of its own, because a process either interprets Triton or compiles it: `python -m
tests.unit.kernels.gpu.compiling` prints one JSON object, {launch: [figures of each kernel]}. Launches are made with tensors
that have no memory; Triton's own specialisation runs (alignment, divisibility), up to the cubin, and stops there. So the
compiled code is the code that a device would be given.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

_WORKERS = 2
_MNEMONIC = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
# The instructions that the gates count: matrix instructions, wide accesses, asynchronous copies, local memory.
_COUNTED = {
    "HGMMA": "HGMMA",
    "HMMA": "HMMA",
    "LDGSTS": "LDGSTS",
    "LDG.128": r"LDG\.E\S*\.128",
    "STG.128": r"STG\.E\S*\.128",
    "STL": "STL",
    "LDL": "LDL",
}


class _NoDriver:
    """The part of a driver that Triton's compiler calls: an H200's target and nothing else."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compile_launch(name: str) -> tuple[str, list[dict]]:
    """Figures of every kernel that one launch of tests.unit.kernels.gpu.launches runs."""
    from tests.unit.kernels.gpu.launches import LAUNCHES

    return name, [_figures(kernel) for kernel in _compiled([LAUNCHES[name]])]


def count_variants(name: str) -> tuple[str, int]:
    """How many kernels are compiled for launches that differ as steps do."""
    from tests.unit.kernels.gpu.launches import VARIANTS

    return name, len({kernel.hash for kernel in _compiled(VARIANTS[name][1])})


def _compiled(launches: Iterable[Callable[[], object]]) -> list:
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_NoDriver())
    run, compiled = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **options):
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    try:
        for launch in launches:
            launch()
    finally:
        JITFunction.run = run
    return compiled


def _figures(kernel) -> dict:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    instructions = Counter(_MNEMONIC.findall(sass))
    counts = {
        label: sum(count for mnemonic, count in instructions.items() if re.match(pattern, mnemonic))
        for label, pattern in _COUNTED.items()
    }
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))
    return {
        "kernel": kernel.metadata.name,
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "instructions": instructions.total(),
        **counts,
    }


def main() -> None:
    """Compile all launches, or those named; or, with --variants, count what launches of many shapes compile."""
    os.environ.pop("TRITON_INTERPRET", None)
    from tests.unit.kernels.gpu.launches import LAUNCHES, VARIANTS

    if sys.argv[1:] == ["--variants"]:
        with ProcessPoolExecutor(_WORKERS, mp_context=get_context("fork")) as pool:
            print(json.dumps(dict(pool.map(count_variants, VARIANTS))))
        return
    names = [name for name in LAUNCHES if not sys.argv[1:] or any(part in name for part in sys.argv[1:])]
    with ProcessPoolExecutor(_WORKERS, mp_context=get_context("fork")) as pool:
        figures = dict(pool.map(compile_launch, names))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kernels)}" for name, kernels in figures.items())
    print(f"{{\n{lines}\n}}")


if __name__ == "__main__":
    assert threading.active_count() == 1, "workers are forked"
    main()
