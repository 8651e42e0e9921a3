"""Row 11: what can run ends, what cannot is refused at once, for days of virtual time on a pool that is full.

The real schedulers of several engines and the real core of the cache service, driven step by step without a wire or a model. In
bursts the pool is full and every engine wants more; the quiet between them is most of the time, and skipped.
"""

from tests.soak.row import Counts
from tests.support.worlds.engine_days import DaysCounts, EngineDays

_BRIEF_S = 600.0
_DAY_S = 86_400.0


def briefly(seed: int) -> Counts:
    """Counts virtual minutes; faults are preemptions, blocks asked back, refused starts and lost sessions. Worst: a stall."""
    counts = EngineDays(seed).run(_BRIEF_S)
    return Counts(round(_BRIEF_S / 60), _faults(counts), counts.longest_stall)


def day(seed: int) -> Counts:
    """Counts virtual hours of one seed."""
    counts = EngineDays(seed).run(_DAY_S)
    assert min(counts.num_full, counts.num_impossible, counts.num_cancelled, counts.num_lost_sessions) > 0, counts
    return Counts(round(_DAY_S / 3600), _faults(counts), counts.longest_stall)


def _faults(counts: DaysCounts) -> int:
    return counts.num_preemptions + counts.num_given_back + counts.num_refused_starts + counts.num_lost_sessions
