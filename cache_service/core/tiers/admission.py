"""Which evicted blocks are copied to the host tier: all while enough of what was copied comes back, else a few on trial.

A copy that is never loaded back takes time and brings nothing. Whether copies come back is a matter of the load, not of a
block: in conversations most blocks return that were used once. So copies and loads are counted, and old counts fade. Where
fewer than one in twenty come back, evicted blocks are forgotten, but for runs of them, one in so many, that show when the load
has changed: whole runs, because a block is of no use without those above it. Is not asked where a tier below stores all that
comes to the host tier, which is the way to it: what pays there may return long after the host tier has forgotten it. Knows
numbers alone.
"""

from math import exp

_LEAST_COPIED, _LEAST_SHARE = 512, 1 / 16  # blocks, or share of the tier, before it is known that little comes back
_SHARE = 1 / 20  # of the copies; computing a block takes more than so many times as long as copying it
_SPAN = 8192  # copies, over which counts fade
_RUN, _TRY_EVERY = 128, 64  # evicted blocks of a trial; and of so many runs one is a trial


class HostAdmission:
    """The counts of one pool's host tier. All are blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._least_copied = max(_LEAST_COPIED, _LEAST_SHARE * num_blocks)
        self.num_refused = 0
        self._num_copied = self._num_returned = 0.0  # faded

    @property
    def pays(self) -> bool:
        return self._num_copied < self._least_copied or self._num_returned >= _SHARE * self._num_copied

    def admits(self, count: int) -> bool:
        """Whether so many evicted blocks are to be copied; counts those that are not."""
        if self.pays or self.num_refused // _RUN % _TRY_EVERY == _TRY_EVERY - 1:
            self.num_refused += 0 if self.pays else count
            return True
        self.num_refused += count
        return False

    def note_copied(self, count: int) -> None:
        kept = exp(-count / _SPAN)
        self._num_copied = kept * self._num_copied + count
        self._num_returned *= kept

    def note_returned(self, count: int) -> None:
        self._num_returned += count
