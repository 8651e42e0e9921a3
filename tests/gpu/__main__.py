"""`python -m tests.gpu`: runs the parts one after another, each in a process of its own and within its time, and reports.

The first part looks at the machine; where that fails, a sentence says what to do, and nothing else is run. What only some parts
need leaves out those alone. When --minutes are over, the part that runs is ended, and the command that runs the rest is named.
Results are files, one for each part, written while it runs; its output and the logs of services lie beside them. The command
exits with 1 when a part failed or did not get to its end, with 2 when parts are left. --dry rehearses on the CPU what can be.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from tests.gpu.checks import LOGS_VARIABLE, Check, PartResult, read_checks, write_result
from tests.gpu.part_machine import PARTS_THAT_NEED

RESULTS = Path(__file__).parent / "results"
MACHINE = "m"
_COMMAND = (sys.executable, "-m", "tests.gpu")

# name -> (module with run(is_dry), seconds it may take, what it is), in the order in which they are worth most
# A limit is for a machine whose caches are cold, of files and of compiled kernels. All limits together are more than a command
# has, so docs/operate/gpu.md runs all parts in three.
PARTS: dict[str, tuple[str, int, str]] = {
    MACHINE: ("tests.gpu.part_machine", 150, "the machine"),
    "a": ("tests.gpu.part_ipc", 90, "CUDA memory between processes"),
    "b": ("tests.gpu.part_kernels", 240, "kernels are right"),
    "q": ("tests.gpu.part_first_tokens", 150, "both services serve as they are by default"),
    "g": ("tests.gpu.part_model", 150, "a model's steps: logits, graphs, launches, profile"),
    "e": ("tests.gpu.part_kills", 90, "kill -9 of each service"),
    "c": ("tests.gpu.part_speed", 180, "kernels are fast"),
    "s": ("tests.gpu.part_sweep", 120, "kernels with other options of their launches"),
    "d": ("tests.gpu.part_serving", 240, "both services serve, in every way"),
}
_LEAST_S = 10  # a part that has less is not begun


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Prove kvkeeper on this machine's CUDA device.")
    parser.add_argument("--dry", action="store_true", help="rehearse without a device")
    parser.add_argument("--parts", default="".join(PARTS), help="which parts, for example ab (default: all); m is run always")
    parser.add_argument("--minutes", type=float, default=9.5, help="after which no part runs any more (default: 9.5)")
    parser.add_argument(
        "--results", type=Path, help="folder of the results (default: one in tests/gpu/results; temporary if dry)"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # a part's own process
    asked = parser.parse_args()
    if asked.part:
        _run_here(asked.part, asked.results, asked.dry)
        return 0
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {''.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the part that runs, with what it has found
    folder: Path = (asked.results or _results_folder(asked.dry)).resolve()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    wanted = [name for name in PARTS if name == MACHINE or name in asked.parts]
    results, left = _run_all(wanted, folder, asked.dry, asked.minutes * 60)
    machine = results[0]
    if _is_useless(machine):
        reasons = [f"{check.name}: {check.note}" for check in machine.checks if check.ok is False] + [machine.problem]
        print("this machine cannot run the checks: " + "; ".join(filter(None, reasons)), file=sys.stderr)
        return 1
    _show(results, folder)
    if left:
        print(f"no time was left for {', '.join(left)}: run `make gpu-check PARTS={''.join(left)} RESULTS={folder}`")
    return 1 if not all(result.is_good for result in results) else 2 if left else 0


def _run_all(wanted: Sequence[str], folder: Path, is_dry: bool, seconds: float) -> tuple[list[PartResult], list[str]]:
    """The results of parts that were begun, the machine's first; and the parts for which there was too little time."""
    end, results, left, barred = time.monotonic() + seconds, list[PartResult](), list[str](), ""
    for number, name in enumerate(wanted, 1):
        _, limit_s, what = PARTS[name]
        limit_s = min(limit_s, int(end - time.monotonic()))
        if name in barred:
            print(f"{name} is left out: this machine lacks what it needs, see {MACHINE}", file=sys.stderr)
            continue
        if limit_s < PARTS[name][1]:
            left.append(name)
            if limit_s < _LEAST_S:
                continue
        print(f"[{number}/{len(wanted)}] {name}: {what}, at most {limit_s} s", file=sys.stderr, flush=True)
        results.append(_run_part(name, folder, is_dry, limit_s))
        if name in left and not results[-1].problem:
            left.remove(name)
        if name == MACHINE:
            barred = _parts_left_out(results[0])
            if _is_useless(results[0]):
                break
    return results, left


def _is_useless(machine: PartResult) -> bool:
    return bool(machine.problem) or any(check.ok is False and check.name not in PARTS_THAT_NEED for check in machine.checks)


def _parts_left_out(machine: PartResult) -> str:
    return "".join(PARTS_THAT_NEED.get(check.name, "") for check in machine.checks if check.ok is False)


def _run_here(name: str, folder: Path, is_dry: bool) -> None:
    """A part, in this process; its file is written anew with each check."""
    run: Callable[[bool], Iterator[Check]] = import_module(PARTS[name][0]).run
    began, checks = time.perf_counter(), list[Check]()
    for check in run(is_dry):
        checks.append(check)
        write_result(folder / f"{name}.json", PartResult(name, time.perf_counter() - began, checks, "it has not ended"))


def _run_part(name: str, folder: Path, is_dry: bool, limit_s: int) -> PartResult:
    """In a process group of its own, all of which is killed when its time is up."""
    path, logs = folder / f"{name}.json", folder / "logs" / name
    logs.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    command = [*_COMMAND, "--part", name, "--results", str(folder), *(["--dry"] if is_dry else [])]
    with (logs / "part.log").open("wb") as log:
        environment = {**os.environ, LOGS_VARIABLE: str(logs)}
        if is_dry:  # threads that wait for each other come to nothing where other work has the processors
            environment["OMP_NUM_THREADS"] = "1"
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            problem = f"ended with {code}: {_last_lines(logs / 'part.log')}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"took longer than {limit_s} s"
        finally:
            _kill_group(process)
    result = PartResult(name, time.perf_counter() - began, read_checks(path), problem)
    write_result(path, result)
    return result


def _last_lines(path: Path) -> str:
    """The last two of what it said."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-2:]) or "it said nothing"


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _results_folder(is_dry: bool) -> Path:
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    return Path(tempfile.mkdtemp(prefix="gpu-check-")) if is_dry else RESULTS / today


def _show(results: list[PartResult], folder: Path) -> None:
    from rich.console import Console  # which only the machine's part has shown to be there
    from rich.table import Table

    console = Console(width=max(120, Console().width))
    for result in results:
        table = Table(title=f"{result.part}: {PARTS[result.part][2]}, {result.seconds:.0f} s", title_justify="left")
        for column in ("check", "", "figures", "note"):
            table.add_column(column, overflow="fold")
        for check in result.checks:
            verdict = {True: "[green]ok", False: "[red]FAILED", None: ""}[check.ok]
            figures = ", ".join(f"{key} {_short(value)}" for key, value in check.figures.items())
            table.add_row(check.name, verdict, figures, check.note)
        if result.problem:
            table.add_row("", "[red]FAILED", "", result.problem)
        console.print(table)
    for result in results:
        counts = [sum(check.ok is verdict for check in result.checks) for verdict in (True, False, None)]
        ended = result.problem or "ended"
        print("{}: {:.0f} s, {} ok, {} failed, {} findings, {}".format(result.part, result.seconds, *counts, ended))
        for check in result.checks:
            if check.ok is False:
                print(f"   FAILED {check.name} {check.figures or ''} {check.note}")
    num_bad = sum(not result.is_good for result in results)
    print(f"{num_bad or 'no'} part{'s' if num_bad != 1 else ''} failed; {folder}")


def _short(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
