"""HitCurve: the hit rate that pools of other sizes would have, each keeping the blocks that were used last.

A block is a hit in every such pool that is larger than its stack distance: the number of other blocks that were used since its
last use. Distances are measured of a sample, as SHARDS does (Waldspurger et al., FAST 2015): a block is sampled by its hash
alone, so that all of its uses are or none is, and a distance among sampled blocks stands for so many more among all. As in its
fixed-size variant the share of blocks begins large and is halved whenever the sample is too large. It is not halved any more
when a whole stack of MOST_SAMPLED stands for eight pools: then what is below its end is a miss in all of them. As in SHARDS_adj
the look-ups that the sample has too many or too few count for the smallest pool, because they are those of few blocks that are
used all the time.

Owns the stack, as sorted hashes with the stamp of each one's last use, 0.4 MB at most. A sampled use costs a microsecond or
two, and of a pool of 20,000 blocks one in twenty is sampled. Knows neither time nor sequences.
"""

import numpy as np
import numpy.typing as npt

from ..values.types import Int64Array

UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the pool
MOST_SAMPLED = 8192
_MOST_STAMPS = 2 * MOST_SAMPLED  # then they are given anew, so that the stack is as long at most
_SLICE_LEN = 16  # stamps that are counted together
_NEVER = 1 << 40  # a distance
_IN_SLICE = np.arange(_SLICE_LEN)
_MOST_AT_ONCE = 256  # uses by several sequences: what is done for each pair of them is to stay little
_FIRST_SHARE = 4  # times the least one
_MOST_OF_ONE = MOST_SAMPLED // 2


class HitCurve:
    """The stack of one pool's blocks."""

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: of the pool."""
        self._num_blocks = num_blocks
        self._least_share = min(1.0, MOST_SAMPLED / (SIZES[-1] * num_blocks))
        self._sample(min(1.0, _FIRST_SHARE * self._least_share))
        # The last key is above all that are sampled, and has no use.
        self._keys: UInt64Array = np.array([2**64 - 1], np.uint64)  # ascending
        self._stamps: Int64Array = np.array([-1])  # by key
        self._is_last: BoolArray = np.zeros(_MOST_STAMPS, np.bool_)  # by stamp: whether a block has it
        self._num_at: Int64Array = np.zeros(_MOST_STAMPS // _SLICE_LEN, np.int64)  # how many have, by slice of stamps
        self._now = 0

    def use(self, hashes: UInt64Array, counts: Int64Array, is_look_up: BoolArray) -> FloatArray:
        """Sequences [n] use so many blocks each, one after the other; hashes [counts.sum()], from the root on.

        is_look_up [n]: of a sequence that looks its blocks up; others have made theirs. Returns [sizes + 1] about how many are
        looked up, by the smallest pool that they hit in; the last are a miss in all.
        """
        owners = np.repeat(np.arange(len(counts)), counts)
        chosen = np.flatnonzero(hashes < self._below)
        keys, owners = hashes[chosen], owners[chosen]
        found = np.zeros(len(SIZES) + 1)
        ends = np.bincount(owners, minlength=len(counts)).cumsum().tolist()
        start = 0
        for end, after in zip(ends, [*ends[1:], len(keys) + _MOST_AT_ONCE + 1], strict=True):
            if after - start > _MOST_AT_ONCE:
                for at in range(start, end, _MOST_OF_ONE):
                    some = slice(at, min(end, at + _MOST_OF_ONE))
                    found += self._use(keys[some], owners[some], is_look_up)
                start = end
        return found

    def _use(self, keys: UInt64Array, owners: Int64Array, is_look_up: BoolArray) -> FloatArray:
        if self._now + len(keys) > _MOST_STAMPS:
            self._stamp_anew()
        is_sampled = keys < self._below  # by a share that may have become smaller
        keys, owners = keys[is_sampled], owners[is_sampled]
        distances = self._take(keys, owners)[is_look_up[owners]]
        return np.bincount(np.searchsorted(self._bounds, distances, side="right"), minlength=len(SIZES) + 1) / self._share

    def _sample(self, share: float) -> None:
        """From now on so many of the blocks are sampled."""
        self._share = share
        self._below = np.uint64(min(int(share * 2.0**64), 2**64 - 1))
        self._bounds = np.array(SIZES) * self._num_blocks * share  # distances of a miss, by size

    def _take(self, keys: UInt64Array, owners: Int64Array) -> Int64Array:
        """[n] distances of these uses, _NEVER for blocks that are not in the stack. owners [n]: ascending.

        Distances are those when the block's sequence begins. It gives up its blocks from the last to the first.
        """
        firsts = np.searchsorted(owners, owners)
        begins = self._now + firsts  # the first stamp of its sequence
        stamps = begins + np.searchsorted(owners, owners, side="right") - 1 - np.arange(len(keys))
        self._now += len(keys)
        at = np.searchsorted(self._keys, keys)
        at_most = np.minimum(at, len(self._keys) - 1)
        is_old = self._keys[at_most] == keys
        before = np.where(is_old, self._stamps[at_most], -1)
        order = np.argsort(keys, kind="stable")
        is_again = keys[order[1:]] == keys[order[:-1]]  # used by an earlier sequence of these
        again, earlier = order[1:][is_again], order[:-1][is_again]
        before[again] = stamps[earlier]
        distances = self._num_newer(before)
        if len(keys) and owners[0] != owners[-1]:
            # A block that is used between the two uses counts once; it does already where its own last use was between them.
            between = (stamps < begins[:, None]) & (stamps > before[:, None]) & (before <= before[:, None])
            distances += np.count_nonzero(between, axis=1)
        distances[before < 0] = _NEVER
        is_new, is_last = ~is_old, np.ones(len(keys), np.bool_)
        is_new[again] = is_old[again] = is_last[earlier] = False
        self._move(self._stamps[at_most[is_old]], keys[is_last], stamps[is_last], keys[is_new])
        return distances

    def _num_newer(self, stamps: Int64Array) -> Int64Array:
        """[n] how many blocks have a stamp behind each of these."""
        slices, places = np.divmod(np.maximum(stamps, 0), _SLICE_LEN)
        in_slice = self._is_last[(slices * _SLICE_LEN)[:, None] + _IN_SLICE] & (places[:, None] < _IN_SLICE)
        behind = self._num_at.sum() - self._num_at.cumsum()
        return behind[slices] + np.count_nonzero(in_slice, axis=1)

    def _move(self, left: Int64Array, keys: UInt64Array, stamps: Int64Array, new: UInt64Array) -> None:
        """These keys have these stamps now, instead of those left; some of them are new."""
        self._is_last[left], self._is_last[stamps] = False, True
        np.subtract.at(self._num_at, left // _SLICE_LEN, 1)
        np.add.at(self._num_at, stamps // _SLICE_LEN, 1)
        if len(new):
            new = np.sort(new)
            places = np.searchsorted(self._keys, new)
            self._keys, self._stamps = np.insert(self._keys, places, new), np.insert(self._stamps, places, 0)
        self._stamps[np.searchsorted(self._keys, keys)] = stamps

    def _stamp_anew(self) -> None:
        """The stamps become the places in the stack, and what is below its end is forgotten."""
        if len(self._keys) > MOST_SAMPLED:
            self._sample(max(self._share / 2, self._least_share))
        order = np.argsort(self._stamps)
        order = order[self._keys[order] < self._below][-MOST_SAMPLED:]
        self._stamps[order] = np.arange(len(order))
        kept = np.append(np.sort(order), len(self._keys) - 1)
        self._keys, self._stamps, self._now = self._keys[kept], self._stamps[kept], len(order)
        self._is_last[:] = np.arange(_MOST_STAMPS) < self._now
        self._num_at = self._is_last.reshape(-1, _SLICE_LEN).sum(axis=1)


def hit_rates(found: FloatArray, num_look_ups: int) -> list[float]:
    """The share of hits by size, of so many look-ups of blocks of which HitCurve.use returned `found`."""
    counts = found[:-1].cumsum() + (num_look_ups - found.sum())
    return [float(rate) for rate in np.maximum.accumulate(np.clip(counts / max(num_look_ups, 1), 0, 1))]
