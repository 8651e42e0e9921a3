"""Whether a load from a tier beats computing again, by what loads and prompts took while the pool ran.

Owns what was measured: of each tier, how long its loads took from wish to end, as sequences saw it; and how long
prompts took from their start to the commit of their last token. Each is a line: a first part, and so much for each block or
token. A load of n blocks pays where its line at n is below what computing n blocks adds to a prompt, so there is a least length
that pays. Tokens far back in a prompt cost more than the line says, to the advantage of computing. Rules: before enough was
measured every load pays, because else nothing would be measured; of loads that do not pay one in some is tried anyway, and one
after a while, so that a tier that has become fast is found; the length in force moves only where what was measured is clearly
past it, so that noise does not make it flap. Knows no tier, and no clock.
"""

import math

_LEAST_SAMPLES = 4  # before a line counts
_FADE = 0.9  # of what was measured, with each new measurement: about the last ten count
_LEAST_SPREAD = 0.1  # of the counts, over their mean: below it first part and slope cannot be distinguished
_LEAST_SLOPE = 0.05  # of the mean seconds for each: a line that claims less has seen noise
_BAND = 1.25  # how far the length in force may be from what was measured, either way, in load time
_TRY_EVERY, _TRY_AFTER = 16, 60.0  # loads that do not pay; seconds since the last measured one
_OF_DEADLINE = 0.8  # that a load is expected to take at most: one that comes too late pays twice
NEVER = 2**31 - 1  # a length that no prompt has


class Line:
    """Seconds that n items took, as first + n * each: least squares over what was measured last."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.first = self.each = 0.0  # seconds
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, n, seconds, n * n, n * seconds

    @property
    def is_known(self) -> bool:
        return self.num_samples >= _LEAST_SAMPLES

    def add(self, count: int, seconds: float) -> None:
        """So many items, one or more, took so long."""
        self.num_samples += 1
        new = (1.0, count, seconds, count * count, count * seconds)
        self._sums = tuple(_FADE * old + more for old, more in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        weight, counts, times, squares, products = self._sums
        mean, mean_time = counts / weight, times / weight
        spread = squares / weight - mean * mean
        slope = most = mean_time / mean
        if spread > (_LEAST_SPREAD * mean) ** 2:
            slope = (products / weight - mean * mean_time) / spread
        self.each = min(max(slope, _LEAST_SLOPE * most), most)
        self.first = mean_time - self.each * mean

    def seconds(self, count: int) -> float:
        """That so many are expected to take."""
        return self.first + count * self.each


class TierWorth:
    """Which loads of one tier pay."""

    def __init__(self, prompts: Line, block_size: int, *, is_on: bool) -> None:
        """prompts: what tokens of prompts took to compute. is_on: else every load pays, and is measured."""
        self.loads = Line()
        self.num_unworthy = 0  # loads that were not ordered
        self._prompts, self._block_size, self._is_on = prompts, block_size, is_on
        self._in_force = 0.0  # blocks
        self._num_untried = 0
        self._measured_at = -math.inf

    def note_load(self, num_blocks: int, seconds: float, now: float) -> None:
        """A load of so many blocks has come, this long after it was wanted."""
        self.loads.add(num_blocks, max(seconds, 0.0))
        self._measured_at = now

    @property
    def least_blocks(self) -> float | None:
        """The fewest blocks of a load that pays; infinite where none does, None while that is not known."""
        if not (self.loads.is_known and self._prompts.is_known):
            return None
        cautious, bold = self._break_even(_BAND), self._break_even(1 / _BAND)
        self._in_force = min(max(self._in_force, bold), cautious)
        return self._in_force

    @property
    def least_tokens(self) -> int:
        """The same in tokens, 1 block at least, for people; 0 while it is not known, NEVER where no load pays."""
        least = self.least_blocks
        if least is None:
            return 0
        return min(max(math.ceil(least), 1) * self._block_size, NEVER) if math.isfinite(least) else NEVER

    def num_paying(self, num_blocks: int, deadline: float) -> int:
        """How many of the first of so many blocks are worth a load that is waited for up to `deadline` seconds; 0 for none."""
        least = self.least_blocks if self._is_on else None
        if least is None:
            return num_blocks
        time_left = _OF_DEADLINE * deadline - self.loads.first
        num_in_time = min(int(max(time_left, 0.0) / self.loads.each), num_blocks) if self.loads.each else num_blocks
        return num_in_time if num_in_time >= max(least, 1) else 0

    def admit(self, num_blocks: int, deadline: float, now: float) -> tuple[int, bool]:
        """How many of these blocks are to be loaded, and whether that is a trial of what does not pay. Counts refusals."""
        num_paying = self.num_paying(num_blocks, deadline)
        if num_paying or not num_blocks:
            return num_paying, False
        self._num_untried += 1
        if self._num_untried >= _TRY_EVERY or now - self._measured_at >= _TRY_AFTER:
            self._num_untried, self._measured_at = 0, now
            return num_blocks, True
        self.num_unworthy += 1
        return 0, False

    def _break_even(self, band: float) -> float:
        """Blocks from which on a load pays, if loads took `band` times what they take."""
        saved = self._prompts.each * self._block_size - band * self.loads.each  # seconds a block
        return band * self.loads.first / saved if saved > 0 else math.inf
