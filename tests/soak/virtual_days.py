"""Row 11: what can run ends, what cannot is refused at once, for days of virtual time on a pool that is full.

The real schedulers of several engines and the real core of the cache service, driven step by step without a wire or a model. In
bursts the pool is full and every engine wants more; the quiet between them is most of the time, and skipped.
"""

from tests.soak.row import Counts
from tests.support.worlds.engine_days import EngineDays


def run(seed: int, seconds: float, unit_s: float, *, sees_all: bool = False) -> Counts:
    """Counts units of virtual time; faults are preemptions, blocks asked back, refused starts and lost sessions.

    Worst: a stall. sees_all: it is long enough for everything that may happen.
    """
    counts = EngineDays(seed).run(seconds)
    if sees_all:
        assert min(counts.num_full, counts.num_impossible, counts.num_cancelled, counts.num_lost_sessions) > 0, counts
    num_faults = counts.num_preemptions + counts.num_given_back + counts.num_refused_starts + counts.num_lost_sessions
    return Counts(round(seconds / unit_s), num_faults, counts.longest_stall)
