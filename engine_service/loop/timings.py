"""Timings: how long something took, as a histogram over the engine's life and exact percentiles of the latest values.

One call takes many values at once, because a step with hundreds of sequences has hundreds of gaps between tokens, and an
observation each would cost more than the step's bookkeeping.
"""

import numpy as np
import numpy.typing as npt

_NUM_RECENT = 4096
# Seconds. A request on a CPU, or in a long queue, takes minutes.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
TOKEN_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Values by size. counts [len(bounds) + 1]: values up to each bound and above the one before; the last is above all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts: npt.NDArray[np.int64] = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count these values."""
        self.counts += np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.total += float(values.sum())


class Timings:
    """Durations of one kind of thing, in seconds."""

    def __init__(self) -> None:
        self.histogram = Histogram(BOUNDS)
        self._recent = np.zeros(_NUM_RECENT)
        self._num_seen = 0

    def add(self, seconds: npt.ArrayLike) -> None:
        """Record one duration, or several in order."""
        values = np.atleast_1d(np.asarray(seconds, np.float64))
        if not len(values):
            return
        self.histogram.add(values)
        values = values[-_NUM_RECENT:]
        self._recent[(self._num_seen + np.arange(len(values))) % _NUM_RECENT] = values
        self._num_seen += len(values)

    @property
    def num(self) -> int:
        return int(self.histogram.counts.sum())

    def percentile_ms(self, percentile: float) -> float:
        """Of the latest 4,096 durations, in milliseconds; 0 without any."""
        recent = self._recent[: min(self._num_seen, _NUM_RECENT)]
        return float(np.percentile(recent, percentile) * 1000) if len(recent) else 0.0
