"""The screen of `kvkeeper top`: takes answers of GetStats, makes what rich can print. Knows no clock and no service."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kvkeeper.cli.show.pool_counts import carrier_word, group_counts, pressure_word
from kvkeeper.cli.show.status import pool_line

HIT_RATE_SECONDS = 10.0
_LEVEL_STYLES = {"low": "green", "medium": "yellow", "high": "dark_orange", "critical": "bold red"}
# Name, field, sign, sign where only ASCII can be shown, colour; in the order of the bar.
_STATES = (
    ("in use", "num_referenced_blocks", "█", "#", "cyan"),
    ("fenced", "num_fenced_blocks", "▓", "=", "magenta"),
    ("in transfer", "num_transfer_blocks", "▓", "=", "blue"),
    ("quarantined", "num_quarantined_blocks", "▓", "!", "red"),
    ("cached", "num_cached_blocks", "▒", "+", "green"),
    ("free", "num_free_blocks", "░", ".", "bright_black"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of GetStats and when it came, in seconds of any monotone clock."""

    at: float
    stats: Any


class History:
    """The samples of the last seconds. A restarted service counts from 0, so its older samples are dropped."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        last = self._samples[-1] if self._samples else None
        # A sum of a service's whole life never shrinks; its epoch grows with each session, so it says nothing.
        if last is not None and sample.stats.uptime_seconds < last.stats.uptime_seconds:
            self._samples.clear()
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at <= sample.at - HIT_RATE_SECONDS:
            self._samples.popleft()

    @property
    def last(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def rate(self, pool: Any, field: str) -> float:
        """How much a sum of the pool grew a second, since the sample before."""
        if len(self._samples) < 2:
            return 0.0
        before, now = self._samples[-2], self._samples[-1]
        return _growth(_pool_in(before, pool), pool, field) / max(now.at - before.at, 1e-9)

    def step_rate(self, session: Any) -> float:
        """Steps of a session a second, since the sample before."""
        if len(self._samples) < 2:
            return 0.0
        before, now = self._samples[-2], self._samples[-1]
        rows = (row for row in before.stats.sessions if row.session_id == session.session_id)
        return _growth(next(rows, None), session, "step_id") / max(now.at - before.at, 1e-9)

    def hit_rate(self, pool: Any) -> tuple[float, int]:
        """(share found of the prompt tokens looked up in the last seconds, how many those were)."""
        before = _pool_in(self._samples[0], pool) if self._samples else None
        num_tokens = _growth(before, pool, "num_look_up_tokens")
        return (_growth(before, pool, "num_hit_tokens") / num_tokens if num_tokens else 0.0), num_tokens


def frame(address: str, history: History, trouble: str = "") -> RenderableType:
    """One screen. trouble says why the last sample is not newer."""
    parts: list[RenderableType] = [_header(address, history.last, trouble)]
    if history.last is not None:
        stats = history.last.stats
        parts += [_pool(pool, history) for pool in stats.pools] or [Text("no pool yet")]
        if stats.sessions:
            parts.append(_sessions(stats.sessions, history))
    return Group(*parts)


class Bar:
    """A line divided in proportion to the counts; a count above 0 always shows."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for (_, _, sign, ascii_sign, color), width in zip(_STATES, widths(self._counts, options.max_width), strict=True):
            yield Segment((ascii_sign if options.ascii_only else sign) * width, Style(color=color))
        yield Segment.line()


def widths(counts: Sequence[int], width: int) -> list[int]:
    """Cells for each count: in proportion, at least one for each that is not 0, `width` in all."""
    total, num_shown = sum(counts), sum(count > 0 for count in counts)
    if not total or width < num_shown:
        return [0] * len(counts)
    rest = width - num_shown
    cells = [(count > 0) + count * rest // total for count in counts]
    fullest = sorted(range(len(counts)), key=lambda i: -(counts[i] * rest % total))
    for i in fullest[: width - sum(cells)]:
        cells[i] += 1
    return cells


def _header(address: str, last: Sample | None, trouble: str) -> Text:
    text = Text.assemble(("kvkeeper", "bold"), f"  {address}")
    if last is not None:
        stats = last.stats
        text.append(f"  up {_duration(stats.uptime_seconds)}, sessions {len(stats.sessions):,} live,")
        text.append(f" {stats.num_opened_sessions:,} opened, {stats.num_reaped_sessions:,} reaped")
    if trouble:
        text.append(f"\n{trouble}", "bold red")
        if last is not None:
            text.append("; below are the last counts received", "red")
    return text


def _pool(pool: Any, history: History) -> Panel:
    counts = [getattr(pool, field) for _, field, _, _, _ in _STATES]
    legend = Text()
    for (name, *_, color), count in zip(_STATES, counts, strict=True):
        if count or name in ("in use", "cached", "free"):
            legend.append(f"{name} {count:,}   ", color)
    share, num_tokens = history.hit_rate(pool)
    level = pressure_word(pool.pressure)

    def growth(*fields: str) -> str:
        return ", ".join(f"{history.rate(pool, field):,.0f}" for field in fields)

    facts = Table.grid(padding=(0, 2))
    for style in ("dim", "", "dim", ""):
        facts.add_column(style=style)
    for row in (
        ("pressure", Text(level, _LEVEL_STYLES.get(level, "")), "hit rate", f"{share:.1%} of {num_tokens:,} tokens"),
        ("running, waiting", f"{pool.num_running_sequences:,}, {pool.num_waiting_sequences:,}", "steps/s", growth("num_steps")),
        (
            *("loading, swapped", f"{pool.num_loading_sequences:,}, {pool.num_swapped_sequences:,}"),
            *("evictions/s", growth("num_evicted_blocks")),
        ),
        (
            *("pins", f"{pool.num_pins:,} on {pool.num_pinned_blocks:,} blocks"),
            *("swaps out, in/s", growth("num_swap_outs", "num_swap_ins")),
        ),
        ("watches", f"{pool.num_watches:,}", "starts refused/s", growth("num_refused_starts")),
    ):
        facts.add_row(*row)
    groups = [Text(f"{kind}: {entries}", "dim") for kind, entries in group_counts(pool)]
    if groups:
        groups.insert(0, Text("entries of tables with a block, left behind, by group of layers"))
    return Panel(Group(Bar(counts), legend, facts, *groups), title=pool_line(pool.pool), title_align="left")


def _sessions(sessions: Sequence[Any], history: History) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("session", "client"):
        table.add_column(name)
    for name in ("sequences", "steps/s", "step", "completed", "lease", "attached", "via"):
        table.add_column(name, justify="right")
    for session in sessions:
        table.add_row(
            session.session_id[:8],
            session.client_name,
            f"{session.num_sequences:,}",
            f"{history.step_rate(session):,.0f}",
            f"{session.step_id:,}",
            f"{session.completed_step_id:,}",
            f"{session.lease_left_ms / 1000:,.1f} s",
            f"{session.num_attached_processes:,}",
            carrier_word(session.step_carrier),
        )
    return table


def _pool_in(sample: Sample, pool: Any) -> Any:
    """The same pool in another sample, None where it was not there yet."""
    return next((row for row in sample.stats.pools if row.pool.spec == pool.pool.spec), None)


def _growth(before: Any, now: Any, field: str) -> int:
    """How much a sum has grown. 0 for one that got smaller: its service was restarted, so the growth is not known."""
    return max(getattr(now, field) - getattr(before, field), 0) if before is not None else 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
