"""How far each row has come, kept in a file between runs.

Owns the file and what it says about a row: the next seed, what was done, the seeds that fail, on which revisions. Rule: PASS
means that the target was reached, that the fault fired and that no seed fails; everything else has another word.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.soak.row import Counts, Row


@dataclass
class Progress:
    """Of one row. failing_seeds are run again first when the soak is resumed."""

    next_seed: int = 0
    done: int = 0
    faults: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    failing_seeds: list[int] = field(default_factory=list)
    revisions: list[str] = field(default_factory=list)

    def add(self, seed: int, counts: Counts) -> None:
        """A unit held."""
        if seed in self.failing_seeds:
            self.failing_seeds.remove(seed)
        self.faults += counts.faults
        self.worst = max(self.worst, counts.worst)
        if counts.faults:
            self.done += counts.done

    def fail(self, seed: int) -> None:
        if seed not in self.failing_seeds:
            self.failing_seeds.append(seed)

    def hours_left(self, row: Row) -> float | None:
        """Of one process, at the pace so far; None where nothing has been done yet."""
        return max(0, row.target - self.done) / self.done * self.seconds / 3600 if self.done else None

    def status(self, row: Row) -> str:
        if self.failing_seeds:
            return f"FAILED seed {self.failing_seeds[0]}"
        return "PASS" if self.done >= row.target and self.faults else "unfinished"


class SoakState:
    """The progress of all rows, in a file that is replaced whole, so that a killed soak leaves a sound one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, Progress] = {}
        if path.exists():
            self.rows = {key: Progress(**fields) for key, fields in json.loads(path.read_text()).items()}

    def of(self, row: Row) -> Progress:
        return self.rows.setdefault(row.key, Progress())

    def save(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({key: asdict(progress) for key, progress in self.rows.items()}, indent=1) + "\n")
        os.replace(new, self._path)


def table(rows: list[Row], state: SoakState) -> str:
    """One line for each row. The pace and the hours left are those of one process."""
    lines = [("row", "done", "target", "unit", "a second", "faults fired", "worst", "violations", "hours left", "status")]
    for row in rows:
        progress = state.of(row)
        violations = str(len(progress.failing_seeds))
        done, target, faults = f"{progress.done:,}", f"{row.target:,}", f"{progress.faults:,} {row.fault}"
        worst, left = f"{progress.worst:.2f} {row.worst}" if row.worst else "", progress.hours_left(row)
        hours = "?" if left is None else f"{left:,.1f}"
        rate = f"{progress.done / progress.seconds:,.3g}" if progress.seconds else "?"
        lines.append((row.key, done, target, row.unit, rate, faults, worst, violations, hours, progress.status(row)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def report(rows: list[Row], state: SoakState) -> list[dict[str, object]]:
    """The same as values, with what each row promises."""
    return [
        {"row": row.number, "name": row.name, "promise": row.promise, "unit": row.unit, "target": row.target,
         "fault": row.fault, "status": state.of(row).status(row), "hours_left": state.of(row).hours_left(row),
         **asdict(state.of(row))} for row in rows
    ]  # fmt: skip
