"""A queue of evictable blocks in arrays, and the stamps that distinguish its live entries from stale ones.

A block that becomes evictable appends (block, stamp); a block that was hit meanwhile, or released again, leaves a stale entry,
which is skipped when its turn comes. With a linked list, every hit and release of a long table would be a walk in Python; here
each is one array operation. Rule: the stamps of one queue increase.

Entries lie in segments of bounded size, so growing copies nothing, and stale entries are swept a segment or two at a time, in
step with what is added: no call does work in proportion to the pool.
"""

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from ..values.memory import written_zeros
from ..values.types import NO_INT32, Int32Array, Int64Array

_LEAST_LOOK = 64  # entries looked at together
_LEAST_SEGMENT = 16
_MOST_SEGMENT = 1024
_STALE_PER_LIVE = 4
_MOST_SHRUNK = 8  # segments in one call
_SWEPT_PER_ENTRY = 3  # entries that the sweeper looks at for each one added, so that less than half of all are stale


class Stamps:
    """The number of each block's last wait, in the order in which waits began; 0 for a block that is not evictable.

    An entry of a queue is live while its stamp is its block's.
    """

    def __init__(self, num_blocks: int) -> None:
        self.clock = 0
        self.newest: Int64Array = written_zeros(num_blocks, np.int64)

    def give(self, blocks: Int32Array) -> Int64Array:
        """[n] new stamps, in order."""
        first = self.clock + 1
        self.clock += len(blocks)
        stamps = np.arange(first, first + len(blocks))
        self.newest[blocks] = stamps
        return stamps

    def end_waits(self, blocks: Int32Array) -> None:
        """These blocks are no longer evictable."""
        self.newest[blocks] = 0

    def are_live(self, blocks: Int32Array, stamps: Int64Array) -> npt.NDArray[np.bool_]:
        return self.newest[blocks] == stamps


Entries = tuple[Int32Array, Int64Array]  # [n] blocks and their stamps


class _Segment:
    """Entries [start, end) of two columns."""

    __slots__ = ("blocks", "end", "stamps", "start")

    def __init__(self, blocks: Int32Array, stamps: Int64Array, end: int) -> None:
        self.blocks, self.stamps, self.start, self.end = blocks, stamps, 0, end


class BlockQueue:
    """A queue of (block, stamp), first in, first out; 12 bytes an entry."""

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._segments: deque[_Segment] = deque()

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def push(self, blocks: Int32Array, stamps: Int64Array) -> None:
        done = 0
        while done < len(blocks):
            segment = self._segments[-1] if self._segments else None
            if segment is None or segment.end == len(segment.blocks):
                segment = self._add_segment()
            part = min(len(blocks) - done, len(segment.blocks) - segment.end)
            end = segment.end + part
            segment.blocks[segment.end : end] = blocks[done : done + part]
            segment.stamps[segment.end : end] = stamps[done : done + part]
            segment.end = end
            done += part

    def first(self) -> int | None:
        """The first live block; None when there is none."""
        newest = self._stamps.newest
        while self._segments:
            first = self._segments[0]
            if first.start < first.end and newest[first.blocks[first.start]] == first.stamps[first.start]:
                return int(first.blocks[first.start])
            live = self._live(first, first.start, first.end)
            if len(live):
                first.start = int(live[0])
                return int(first.blocks[first.start])
            self._segments.popleft()
        return None

    def pop(self, count: int, until: int | None = None) -> Int32Array:
        """The first live blocks, at most count and with stamps up to `until`."""
        popped: list[Int32Array] = []
        while count > 0 and self._segments:
            first = self._segments[0]
            stop = min(first.end, first.start + max(count, _LEAST_LOOK))
            if until is not None and stop > first.start and first.stamps[stop - 1] > until:
                stop = first.start + int(np.searchsorted(first.stamps[first.start : stop], until, "right"))
                if stop == first.start:
                    break
            live = self._live(first, first.start, stop)[:count]
            popped.append(first.blocks[live])
            count -= len(live)
            first.start = stop if count else int(live[-1]) + 1
            if first.start == first.end:
                self._segments.popleft()
        if len(popped) == 1:
            return popped[0]
        return np.concatenate(popped) if popped else NO_INT32

    def shrink_to(self, num_live: int) -> None:
        """num_live entries are live. Sweeps last segments that are mostly stale, because no Sweeper visits the last one."""
        for _ in range(_MOST_SHRUNK):
            last = self._segments[-1] if self._segments else None
            if last is None or last.end - last.start <= _STALE_PER_LIVE * num_live + _LEAST_LOOK:
                return
            self.sweep(len(self._segments) - 1)

    def live(self) -> Int32Array:
        """All live blocks in order."""
        rows = [segment.blocks[self._live(segment, segment.start, segment.end)] for segment in self._segments]
        return np.concatenate([NO_INT32, *rows])

    def rows(self) -> list[Entries]:
        """All entries as of now, in order, stale ones too; what comes and goes later changes nothing in them."""
        return [
            (segment.blocks[segment.start : segment.end], segment.stamps[segment.start : segment.end])
            for segment in self._segments
        ]

    def sweep(self, idx: int) -> int:
        """Drops the stale entries of a segment, and joins it with the one before where both fit. Returns the next index."""
        segment = self._segments[idx]
        live = self._live(segment, segment.start, segment.end)
        before = self._segments[idx - 1] if idx else None
        blocks, stamps = segment.blocks[live], segment.stamps[live]
        if before is not None and before.end - before.start + len(live) <= _MOST_SEGMENT:
            blocks = np.concatenate([before.blocks[before.start : before.end], blocks])
            stamps = np.concatenate([before.stamps[before.start : before.end], stamps])
            self._segments[idx - 1] = _Segment(blocks, stamps, len(blocks))
            del self._segments[idx]
            return idx
        self._segments[idx] = _Segment(blocks, stamps, len(blocks))
        return idx + 1

    def _live(self, segment: _Segment, start: int, stop: int) -> Int64Array:
        """Indices of the live entries in [start, stop) of a segment."""
        live = self._stamps.are_live(segment.blocks[start:stop], segment.stamps[start:stop]).nonzero()[0]
        return live + start if start else live

    def _add_segment(self) -> _Segment:
        """Appends a segment. The first of a queue is small, because some policies have hundreds of queues."""
        room = min(2 * len(self._segments[-1].blocks), _MOST_SEGMENT) if self._segments else _LEAST_SEGMENT
        room = max(room, _LEAST_SEGMENT)
        segment = _Segment(np.empty(room, np.int32), np.empty(room, np.int64), 0)
        self._segments.append(segment)
        return segment


class Sweeper:
    """Visits the segments of several queues in turn; adding entries pays for the visits."""

    def __init__(self) -> None:
        self._num_due = 0
        self._queue_idx = self._segment_idx = 0

    def pay(self, num_added: int, queues: Collection[BlockQueue]) -> None:
        self._num_due += num_added * _SWEPT_PER_ENTRY
        while self._num_due >= _MOST_SEGMENT:
            self._num_due -= _MOST_SEGMENT
            self._visit(list(queues))

    def _visit(self, queues: Sequence[BlockQueue]) -> None:
        if self._queue_idx >= len(queues):
            self._queue_idx = self._segment_idx = 0
        if not queues:
            return
        queue = queues[self._queue_idx]
        # The last segment is being filled: it is swept when it is full and another one follows.
        if self._segment_idx < queue.num_segments - 1:
            self._segment_idx = queue.sweep(self._segment_idx)
        else:
            self._queue_idx, self._segment_idx = self._queue_idx + 1, 0
