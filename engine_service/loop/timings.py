"""Timings: how long something took, as a histogram over the engine's life and exact percentiles of the latest values.

A step with hundreds of sequences has hundreds of gaps between tokens, and many steps come a second, but they are looked at
once in a while. So what comes is kept as it is, and sorted in when they are looked at or much has come.
"""

from bisect import bisect_left

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

    def count(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Timings:
    """Durations of one kind of thing, in seconds."""

    def __init__(self) -> None:
        self._histogram = Histogram(BOUNDS)
        self._recent = np.zeros(_NUM_RECENT)
        self._num_seen = 0
        self._singles: list[float] = []  # not sorted in yet; those behind the runs
        self._runs: list[npt.NDArray[np.float64]] = []
        self._num_in_runs = 0

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Record several durations in order. The array is kept, and not to be changed."""
        if not len(seconds):
            return
        if self._singles:
            self._close_run()
        self._runs.append(seconds)
        self._num_in_runs += len(seconds)
        if self._num_in_runs >= _NUM_RECENT:
            self._sort_in()

    def note(self, seconds: float) -> None:
        """Record one duration."""
        self._singles.append(seconds)
        if len(self._singles) >= _NUM_RECENT:
            self._sort_in()

    @property
    def histogram(self) -> Histogram:
        """The histogram of all durations so far."""
        self._sort_in()
        return self._histogram

    @property
    def num(self) -> int:
        return int(self.histogram.counts.sum())

    def percentile_ms(self, percentile: float) -> float:
        """A percentile of the latest 4,096 durations, in milliseconds; 0 without any."""
        self._sort_in()
        recent = self._recent[: min(self._num_seen, _NUM_RECENT)]
        return float(np.percentile(recent, percentile) * 1000) if len(recent) else 0.0

    def _close_run(self) -> None:
        self._runs.append(np.array(self._singles, np.float64))
        self._num_in_runs += len(self._singles)
        self._singles = []

    def _sort_in(self) -> None:
        self._close_run()
        values, self._runs, self._num_in_runs = np.concatenate(self._runs), [], 0
        if not len(values):
            return
        self._histogram.add(values)
        values = values[-_NUM_RECENT:]
        self._recent[(self._num_seen + np.arange(len(values))) % _NUM_RECENT] = values
        self._num_seen += len(values)
