"""Compile the launches of the wrappers for sm_90, without a device, and read what came out.

Run as a process of its own, because a process either interprets Triton or compiles it: `python -m
tests.unit.kernels.gpu.compiling` prints one JSON object, {launch: [figures of each kernel]}. Launches are made with tensors
that have no memory; Triton's own specialisation runs (alignment, divisibility), up to the cubin, and stops there. So the
compiled code is the code that a device would be given.

Registers, stack and size are those of the cubin. Matrix instructions, wide accesses and asynchronous copies are counted in the
PTX, each of whose instructions of these kinds becomes one of the machine's: a disassembler takes longer than the compiler.
"""

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

_WORKERS = 2
# Instructions that the gates count: matrix products of a warp group and of a warp, asynchronous copies, 16 bytes at a time.
_COUNTED = {
    "wgmma": re.compile(r"\bwgmma\.mma_async\."),
    "mma": re.compile(r"\bmma\.sync\."),
    "cp.async": re.compile(r"\bcp\.async\.c[ag]\."),
    "load.16": re.compile(r"\bld\.global\S*\.(?:v4\.[bsu]32|v2\.[bsu]64)\b"),
    "store.16": re.compile(r"\bst\.global\S*\.(?:v4\.[bsu]32|v2\.[bsu]64)\b"),
}
_INSTRUCTION_BYTES = 16
_ELF_SECTIONS, _ELF_SECTION = struct.Struct("<40xQ10xHHH"), struct.Struct("<II8xQQQ24x")


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

    return name, [_figures(kernel) for kernel in _compiled(LAUNCHES[name])]


def _compiled(launch: Callable[[], object]) -> list:
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_NoDriver())
    run, compiled = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **options):
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    try:
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
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK", "LOCAL"))
    return {
        "kernel": kernel.metadata.name,
        "registers": registers,
        "stack": stack + local,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "fused": kernel.metadata.enable_fp_fusion,
        "instructions": _num_code_bytes(kernel.asm["cubin"]) // _INSTRUCTION_BYTES,
        **{label: len(pattern.findall(kernel.asm["ptx"])) for label, pattern in _COUNTED.items()},
    }


def _num_code_bytes(cubin: bytes) -> int:
    """Of an ELF file: the size of its sections of code."""
    table, size, count, names_at = _ELF_SECTIONS.unpack_from(cubin)
    sections = [_ELF_SECTION.unpack_from(cubin, table + size * at) for at in range(count)]
    names = sections[names_at][3]
    return sum(num_bytes for name, *_, num_bytes in sections if cubin[names + name :].startswith(b".text."))


def main() -> None:
    """Compile all launches, or those named."""
    os.environ.pop("TRITON_INTERPRET", None)
    from tests.unit.kernels.gpu.launches import LAUNCHES

    chosen = [name for name in LAUNCHES if name in sys.argv or not sys.argv[1:]]
    with ProcessPoolExecutor(_WORKERS, mp_context=get_context("fork")) as pool:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kernels)}" for name, kernels in pool.map(compile_launch, chosen))
    print(f"{{\n{lines}\n}}")


if __name__ == "__main__":
    assert threading.active_count() == 1, "workers are forked"
    main()
