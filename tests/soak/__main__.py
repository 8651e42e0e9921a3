"""The promises against their figures, for as long as there is time: `python -m tests.soak --rows 1,5 --minutes 30`.

Units of the chosen rows run in up to two processes; the row that has had the least time is next, so that all get the same.
The state file says where each row stands, and another run goes on from there. `--seed N` replays one seed of each chosen row
here, and changes no state. Exit code 1 says that a promise was broken.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

from tqdm import tqdm

from tests.soak.progress import SoakState, report, table
from tests.soak.row import Row
from tests.soak.rows import ROWS
from tests.soak.worker import Outcome, Worker, quiet

_POLL_S = 1.0


class Soak:
    """Runs rows until `is_over` or until each has passed or failed."""

    def __init__(self, rows: list[Row], state: SoakState, revision: str, num_workers: int = 2) -> None:
        self._rows = rows
        self._state = state
        self._revision = revision
        self._workers = [Worker() for _ in range(num_workers)]
        self._spent = {row.key: 0.0 for row in rows}  # seconds in this run, those of units under way included
        self._again = {row.key: list(state.of(row).failing_seeds) for row in rows}
        self._failed: set[str] = set()

    def run(self, is_over: Callable[[], bool], told: Callable[[Outcome], object]) -> None:
        """Tells each outcome. Units under way when the time is over are waited for."""
        try:
            while not is_over() and self._start_what_may():
                self._collect(told)
            while self._busy():
                self._collect(told)
        finally:
            for worker in self._workers:
                worker.stop()

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.row is not None]

    def _start_what_may(self) -> bool:
        """Gives idle workers units. False when there is nothing to run and nothing under way."""
        for worker in self._workers:
            open_rows = [row for row in self._rows if row.key not in self._failed and self._is_open(row)]
            if worker.row is not None or not open_rows:
                continue
            row = min(open_rows, key=lambda row: self._spent[row.key])
            busy = self._busy()
            if busy and (row.is_timed or any(other.row is not None and other.row.is_timed for other in busy)):
                break
            worker.start(row, self._next_seed(row))
            self._spent[row.key] += 1e-3  # so that two workers do not start with the same row
        return bool(self._busy())

    def _is_open(self, row: Row) -> bool:
        return bool(self._again[row.key]) or self._state.of(row).status(row) != "PASS"

    def _next_seed(self, row: Row) -> int:
        if self._again[row.key]:
            return self._again[row.key].pop(0)
        progress = self._state.of(row)
        progress.next_seed += 1
        return progress.next_seed - 1

    def _collect(self, told: Callable[[Outcome], object]) -> None:
        wait([worker.connection for worker in self._busy() if worker.connection is not None], _POLL_S)
        for worker in self._busy():
            outcome = worker.outcome()
            if outcome is None:
                continue
            row, progress = outcome.row, self._state.of(outcome.row)
            if outcome.counts is None:
                progress.fail(outcome.seed)
                self._failed.add(row.key)
            else:
                progress.add(outcome.seed, outcome.counts)
            if self._revision not in progress.revisions:
                progress.revisions.append(self._revision)
            progress.seconds = round(progress.seconds + outcome.seconds, 1)
            self._spent[row.key] += outcome.seconds
            self._state.save()
            told(outcome)


def replay_command(row: Row, seed: int) -> str:
    return f"make soak ROWS={row.number} SEED={seed}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_listing()
    )
    parser.add_argument("--rows", default="", help="numbers with commas between them (default: all)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--state", type=Path, default=Path(".soak.json"), help="where to go on from (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="replay this seed of each chosen row here")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="processes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    args = parser.parse_args(argv)
    wanted = {word.strip() for word in args.rows.split(",") if word.strip()}
    rows = [row for row in ROWS if not wanted or str(row.number) in wanted]
    unknown = wanted - {str(row.number) for row in ROWS}
    if unknown:
        parser.error(
            f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(sorted({str(r.number) for r in ROWS}))}"
        )
    if args.seed is not None:
        quiet()
        for row in rows:
            print(f"{row.key}, seed {args.seed}: {row.run(args.seed)}")
        return 0
    state = SoakState(args.state)
    soak_for(rows, state, 60 * args.minutes, args.jobs)
    print(json.dumps(report(rows, state)) if args.json else table(rows, state))
    failed = [(row, seed) for row in rows for seed in state.of(row).failing_seeds]
    for row, seed in failed:
        print(f"row {row.key} fails; replay it with: {replay_command(row, seed)}", file=sys.stderr)
    return 1 if failed else 0


def soak_for(rows: list[Row], state: SoakState, seconds: float, num_workers: int) -> None:
    """Runs rows for so long, with a progress bar; a violation is shown as it happens."""
    started = time.monotonic()
    with tqdm(total=round(seconds), unit="s", bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} s") as bar:

        def elapsed() -> float:
            bar.n = min(round(time.monotonic() - started), bar.total)
            bar.refresh()
            return time.monotonic() - started

        def told(outcome: Outcome) -> None:
            progress = state.of(outcome.row)
            bar.set_description(f"{outcome.row.key}: {progress.done:,}/{outcome.row.target:,}", refresh=False)
            if outcome.error is not None:
                bar.write(f"row {outcome.row.key}, seed {outcome.seed}: {outcome.error}", file=sys.stderr)

        Soak(rows, state, _revision(), num_workers).run(lambda: elapsed() >= seconds, told)


def _revision() -> str:
    """What the figures were made on."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _listing() -> str:
    return "rows:\n" + "\n".join(f"  {row.number:2} {row.promise} ({row.name})" for row in ROWS)


if __name__ == "__main__":
    sys.exit(main())
