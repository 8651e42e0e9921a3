"""The figures as Markdown: tokens a second by workload, and the times of each."""

from collections.abc import Iterable, Sequence
from typing import Any

_TIMES = ("first_token_p50_ms", "first_token_p99_ms", "between_tokens_p99_ms", "first_system_times_this", "load")
_HEADS = ("first token p50, ms", "p99, ms", "between tokens p99, ms", "first system / this", "load")


def tables(figures: Iterable[dict[str, Any]]) -> str:
    """figures: those that measure() of __main__.py yields; what was left out stands below as sentences."""
    every = list(figures)
    rows = [row for row in every if "per_second" in row]
    starts = {(row["dtype"], row["system"]): f"{row['start_to_ready_s']:.1f}" for row in every if "start_to_ready_s" in row}
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    rates = {(row["dtype"], row["system"], row["workload"]): f"{row['per_second']:,.0f}" for row in rows}
    parts = [
        _table(
            ("tokens a second", *workloads, "start to ready, s"),
            [
                (f"{system} {dtype}", *(rates.get((dtype, system, workload), "-") for workload in workloads), start)
                for (dtype, system), start in starts.items()
            ],
        ),
        _table(
            ("workload", "system", *_HEADS),
            [(row["workload"], f"{row['system']} {row['dtype']}", *(f"{row[name]:g}" for name in _TIMES)) for row in rows],
        ),
        "\n".join(dict.fromkeys(f"{row['skipped']}." for row in every if "skipped" in row)),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
