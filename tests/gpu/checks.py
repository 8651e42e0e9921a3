"""Check: one result of a part, and the file to which all parts write their results."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """ok None: a finding, or a figure that is reported and not judged. figures are numbers with their unit in the name."""

    name: str
    ok: bool | None
    figures: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class PartResult:
    """What one part came to. problem: why it did not get to its end; empty when it did."""

    part: str
    seconds: float
    checks: list[Check]
    problem: str = ""

    @property
    def is_good(self) -> bool:
        return not self.problem and bool(self.checks) and all(check.ok is not False for check in self.checks)


def text_of(failure: Exception) -> str:
    """Its type and the first line of what it says."""
    first, *_ = [*str(failure).splitlines(), ""]
    return f"{type(failure).__name__}: {first[:200]}"


def write_checks(path: Path, checks: Iterable[Check]) -> None:
    """One JSON object a line, appended, so that what a part found is there even if it does not get to its end."""
    with path.open("a") as file:
        for check in checks:
            file.write(json.dumps(asdict(check)) + "\n")


def read_checks(path: Path) -> list[Check]:
    """All that was written; a last line that was cut off is left out."""
    checks = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            checks.append(Check(**json.loads(line)))
        except ValueError:
            continue
    return checks
