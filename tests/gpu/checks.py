"""Check: one result of a part, and the file that a part's results are in while it runs and after it."""

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOGS_VARIABLE = "KVKEEPER_SERVICE_LOGS"  # folder for the logs of services and other files of the running part


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
    """Its type and the last two lines of what it says: a compiler begins with the place, and ends with the reason."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {' | '.join(lines[-2:])[-400:]}"


def guarded(name: str, measure: Callable[[], Check]) -> Check:
    """What a measurement returns, or a failed check. The traceback goes to the log of the part, and the part continues."""
    try:
        return measure()
    except Exception as failure:  # a kernel that does not compile or launch may raise anything
        traceback.print_exc()
        return Check(name, False, note=text_of(failure))


def write_result(path: Path, result: PartResult) -> None:
    """One JSON object, whole at all times: what a part found is there even if it does not get to its end."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(result), indent=1) + "\n")
    fresh.replace(path)


def read_checks(path: Path) -> list[Check]:
    """Those that were written; none where there is no file."""
    return [Check(**check) for check in json.loads(path.read_text())["checks"]] if path.exists() else []


def keep_text(name: str, text: str) -> str:
    """Keep a text beside the logs of the running part, where it has such. The file's path, or where that was."""
    folder = os.environ.get(LOGS_VARIABLE)
    if folder is None:
        return "not kept: the part runs by itself"
    path = Path(folder) / name
    path.write_text(text)
    return str(path)
