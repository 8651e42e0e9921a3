"""`python -m tests.gpu`: runs the parts one after another, each in a process of its own and within its time, and reports.

Exits 1 when a part failed or did not get to its end. --dry rehearses on the CPU what can be rehearsed there; then a check that
needs the device is left out and said to be.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from tests.gpu.checks import Check, PartResult, read_checks, write_checks

RESULTS = Path(__file__).parent / "results"

# name -> (module with run(is_dry), seconds it may take, what it is)
PARTS: dict[str, tuple[str, int, str]] = {
    "a": ("tests.gpu.part_ipc", 90, "CUDA memory between processes"),
    "b": ("tests.gpu.part_kernels", 100, "kernels are right"),
    "c": ("tests.gpu.part_speed", 150, "kernels are fast"),
    "d": ("tests.gpu.part_serving", 140, "both services serve"),
    "e": ("tests.gpu.part_kills", 60, "kill -9 of each service"),
}


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Prove kvkeeper on this machine's CUDA device.")
    parser.add_argument("--dry", action="store_true", help="rehearse without a device")
    parser.add_argument("--parts", default="".join(PARTS), help="which parts, for example ab (default: all)")
    parser.add_argument(
        "--results", type=Path, help="folder of the results file (default: tests/gpu/results, or a temporary one)"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # a part's own process
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        run: Callable[[bool], Iterator[Check]] = import_module(PARTS[asked.part][0]).run
        for check in run(asked.dry):
            write_checks(asked.out, [check])
        return 0
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {''.join(PARTS)}")
    device = "rehearsal" if asked.dry else _device()
    results = [_run_part(name, asked.dry) for name in tqdm(sorted(asked.parts), desc="gpu-check", unit="part", file=sys.stderr)]
    path = _write(asked.results or (Path(tempfile.gettempdir()) if asked.dry else RESULTS), device, results)
    _show(device, results, path)
    return 0 if all(result.is_good for result in results) else 1


def _run_part(name: str, is_dry: bool) -> PartResult:
    """In a process group of its own, all of which is killed when its time is up."""
    _, limit_s, _ = PARTS[name]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "checks"
        command = [sys.executable, "-m", "tests.gpu", "--part", name, "--out", str(out), *(["--dry"] if is_dry else [])]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code = process.wait(limit_s)
            problem = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"took longer than {limit_s} s"
        finally:
            _kill_group(process)
        return PartResult(name, time.perf_counter() - began, read_checks(out), problem)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _device() -> str:
    """The device's name. Ends the process where there is none."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device is visible to torch; --dry rehearses without one")
    return torch.cuda.get_device_name(0)


def _write(folder: Path, device: str, results: list[PartResult]) -> Path:
    import torch
    import triton

    now = datetime.now(UTC)
    name = "-".join(device.lower().split())
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    content: dict[str, Any] = {
        "device": device,
        "date": now.strftime("%Y-%m-%d"),
        "versions": {**versions, "cuda": torch.version.cuda},
        "parts": {result.part: asdict(result) for result in results},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{content['date']}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _show(device: str, results: list[PartResult], path: Path) -> None:
    console = Console(width=max(120, Console().width))
    for result in results:
        table = Table(title=f"{result.part}: {PARTS[result.part][2]}, {result.seconds:.0f} s", title_justify="left")
        for column in ("check", "", "figures", "note"):
            table.add_column(column, overflow="fold")
        for check in result.checks:
            verdict = {True: "[green]ok", False: "[red]FAILED", None: ""}[check.ok]
            table.add_row(
                check.name, verdict, ", ".join(f"{key} {_short(value)}" for key, value in check.figures.items()), check.note
            )
        if result.problem:
            table.add_row("", "[red]FAILED", "", result.problem)
        console.print(table)
    num_bad = sum(not result.is_good for result in results)
    console.print(f"{device}: {num_bad or 'no'} part{'s' if num_bad != 1 else ''} failed; {path}")


def _short(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
