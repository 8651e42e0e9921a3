"""Hit density: the hits to be expected of a cached block per block and time, by the number and age of its uses.

Owns the counts of what became of all blocks seen, cached or not. A waiting block is in a cell (class, age): the class is its
number of uses, the age is the number of blocks that became evictable since it did, in half octaves. Events are reuses and
disappearances. The weight of everything learned halves within a few turnovers of the cache.

- Chance of a reuse in each cell: reuses over the blocks that reached the cell. Blocks that still wait or were forgotten count
  for as long as they were seen (Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958). Without
  them, the estimate would see lucky blocks only.
- Little evidence counts little: the average over the classes is mixed in, with the weight of a few requests. Blocks of a
  request come and go together, so evidence is weighed in requests, not blocks.
- At the same age, a class with more uses is never taken to be less likely to return; where the counts say so, the classes are
  pooled (isotonic regression; Ayer et al., 1955).
- Hit density: the best ratio, over all times to give up, of the chance to see the block again until then and the time it is
  expected to take room until then (the index of Gittins, "Bandit processes and dynamic allocation indices", 1979; with one
  time to give up for all blocks it is the hit density of Beckmann, Chen, Cidon, "LHD", NSDI 2018).
- Hit density never grows with age.

The two rules with "never" make the order of eviction leaves-first, see adaptive.py.
"""

import math

import numpy as np
import numpy.typing as npt

from ..values.types import Int64Array
from .ghosts import Traces, Uint8Array

NUM_CLASSES = 8  # 1 use, 2 uses, and so on; the last is open
NUM_AGES = 48

FloatArray = npt.NDArray[np.float64]

_MOST_UNCOUNTED = 4096  # events kept until they are counted, because counting a few costs as much as counting many
_REQUESTS_MIXED_IN = 4
_KEPT_WEIGHT = 0.97  # of the earlier counts, at each lesson


def age_idx(age: int) -> int:
    """Half octaves: 0 up to 1, then from 1.4, 2, 2.8, 4, 5.7 on ..."""
    return min(int(2 * math.log2(age)), NUM_AGES - 1) if age > 1 else 0


def first_age(idx: int) -> int:
    """The least age whose index is idx."""
    return int(np.ceil(2 ** (idx / 2)))


class HitDensity:
    """The hit density of each cell, table [NUM_CLASSES, NUM_AGES]: never less for more uses, never more for a greater age."""

    def __init__(self) -> None:
        self._reuses = _Events()
        self._lost = _Events()
        # Before anything is known the age decides: least recently used first.
        self.table: list[list[float]] = [[1 / (1 + age) for age in range(NUM_AGES)]] * NUM_CLASSES

    def saw_reuse(self, blocks: Traces, now: int) -> None:
        """These blocks are used again now."""
        self._reuses.add(blocks, now)

    def lost_sight(self, blocks: Traces, now: int) -> None:
        """These blocks were not used up to now, and will not be recognised any more."""
        self._lost.add(blocks, now)

    def learn(self, waiting: list[tuple[Traces, int]], now: int, request_len: float) -> None:
        """Computes the table anew. waiting: samples of the waiting blocks, with the number of blocks that each stands for."""
        reuses, lost = self._reuses.weights(), self._lost.weights()
        lost = lost + sum(every * _count(sample.uses, now - sample.stamps) for sample, every in waiting)
        reached = np.cumsum((reuses + lost)[:, ::-1], axis=1)[:, ::-1] - lost / 2
        average = reuses.sum(0) / np.maximum(reached.sum(0), 1)
        mixed_in = _REQUESTS_MIXED_IN * request_len
        chances = (reuses + mixed_in * average) / (reached + mixed_in)
        table = _best_ratio(_pooled(chances, reached + mixed_in))
        self.table = np.minimum.accumulate(np.maximum.accumulate(table, axis=0), axis=1).tolist()
        self._reuses.fade()
        self._lost.fade()


class _Events:
    """How often something happened in each cell, [NUM_CLASSES, NUM_AGES]."""

    def __init__(self) -> None:
        self._weights: FloatArray = np.zeros((NUM_CLASSES, NUM_AGES))
        self._uses: list[Uint8Array] = []
        self._ages: list[Int64Array] = []
        self._num_uncounted = 0

    def add(self, blocks: Traces, now: int) -> None:
        if not len(blocks.uses):
            return  # empty arrays would pile up until the next lesson, which may never come
        self._uses.append(blocks.uses)
        self._ages.append(now - blocks.stamps)
        self._num_uncounted += len(blocks.uses)
        if self._num_uncounted > _MOST_UNCOUNTED:
            self._count()

    def weights(self) -> FloatArray:
        if self._uses:
            self._count()
        return self._weights

    def fade(self) -> None:
        self._weights *= _KEPT_WEIGHT

    def _count(self) -> None:
        self._weights += _count(np.concatenate(self._uses), np.concatenate(self._ages))
        self._uses, self._ages, self._num_uncounted = [], [], 0


def _count(uses: Uint8Array, ages: Int64Array) -> FloatArray:
    """The number of blocks in each cell; blocks without uses are left out."""
    seen = uses > 0
    rows = uses[seen].astype(np.int64) - 1
    columns = np.minimum(2 * np.log2(np.maximum(ages[seen], 1)), NUM_AGES - 1).astype(np.int64)
    cells = np.bincount(rows * NUM_AGES + columns, minlength=NUM_CLASSES * NUM_AGES)
    return cells.reshape(NUM_CLASSES, NUM_AGES).astype(np.float64)


def _pooled(chances: FloatArray, weights: FloatArray) -> FloatArray:
    """The closest table that does not fall from class to class: max over starts of min over ends of the mean in between."""
    mass = np.concatenate([np.zeros((1, NUM_AGES)), np.cumsum(weights, 0)])
    value = np.concatenate([np.zeros((1, NUM_AGES)), np.cumsum(weights * chances, 0)])
    result = np.empty_like(chances)
    for row in range(NUM_CLASSES):
        starts, ends = slice(0, row + 1), slice(row + 1, NUM_CLASSES + 1)
        means = (value[None, ends] - value[starts, None]) / (mass[None, ends] - mass[starts, None])
        result[row] = means.min(1).max(0)
    return result


def _best_ratio(chances: FloatArray) -> FloatArray:
    """[classes, ages] from chances per cell: max over ends of (chance of a reuse until then) / (expected time until then)."""
    edges = 2 ** (np.arange(NUM_AGES + 1) / 2)
    stays = np.cumsum(np.log1p(-np.clip(chances, 0, 0.999)), axis=1)
    before = np.concatenate([np.zeros((NUM_CLASSES, 1)), stays[:, :-1]], axis=1)
    later = np.triu(np.ones((NUM_AGES, NUM_AGES), np.bool_))  # [from, at]
    reaches = np.where(later, np.exp(np.minimum(before[:, None, :] - before[:, :, None], 0)), 0)
    takes = np.cumsum(reaches * ((1 - chances / 2) * np.diff(edges))[:, None, :], axis=2)
    returns = 1 - np.exp(np.minimum(stays[:, None, :] - before[:, :, None], 0))
    ratios = np.where(later, returns / np.where(later, takes, 1), 0)
    return np.asarray(ratios.max(axis=2))
