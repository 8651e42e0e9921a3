"""Hit density: the hits to be expected of a cached block per block and time, by its class and the age of its last use.

Owns the counts of what became of all blocks seen, cached or not. A waiting block is in a cell (class, age): the class says how
often it was used and by which kind of request (use_history.py), the age is the number of blocks that became evictable since it
did, in half octaves. Events are reuses and disappearances. The weight of everything learned halves within some turnovers.

- Chance of a reuse in each cell: reuses over the blocks that reached the cell. Blocks that still wait or were forgotten count
  for as long as they were seen (Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958). Without
  them, the estimate would see lucky blocks only.
- A class takes the course over age from all classes with as many uses, and has a factor of its own (proportional hazards; Cox,
  "Regression models and life-tables", 1972), because its own counts are too few for a curve.
- Little evidence counts little: the average is mixed in, with the weight of a few requests. Blocks of a request come and go
  together, so evidence is weighed in requests, not blocks.
- Hit density: the best ratio, over all times to give up, of the chance to see the block again until then and the time it is
  expected to take room until then (the index of Gittins, "Bandit processes and dynamic allocation indices", 1979; with one
  time to give up for all blocks it is the hit density of Beckmann, Chen, Cidon, "LHD", NSDI 2018).

Hit density may grow with age: in a cycle longer than the cache, the blocks used last are the last to return.
"""

import numpy as np
import numpy.typing as npt

from ..values.types import Int64Array
from .ghosts import UNITS_PER_TURNOVER, Traces
from .use_history import CLASSES_PER_USE, NUM_CLASSES

NUM_AGES = 32  # up to 256 turnovers

FloatArray = npt.NDArray[np.float64]

_MOST_UNCOUNTED = 4096  # events kept until they are counted, because counting a few costs as much as counting many
_REQUESTS_MIXED_IN = 4
_KEPT_WEIGHT = 0.97  # of the earlier counts, at each lesson
_EDGES = 2 ** (np.arange(NUM_AGES + 1) / 2)
_LATER = np.triu(np.ones((NUM_AGES, NUM_AGES), np.bool_))  # [from, at]


class HitDensity:
    """table [NUM_CLASSES, NUM_AGES]."""

    def __init__(self, num_blocks: int) -> None:
        unit = max(1, num_blocks // UNITS_PER_TURNOVER)
        self._ends = np.ceil(unit * _EDGES[1:-1]).astype(np.int64)
        self._reuses = _Events(self._ends)
        self._lost = _Events(self._ends)
        # Before anything is known the age decides: least recently used first.
        self.table: FloatArray = np.tile(1 / (1 + np.arange(NUM_AGES)), (NUM_CLASSES, 1))

    def of(self, blocks: Traces, now: int) -> FloatArray:
        """[n] hit densities."""
        return np.asarray(self.table[blocks.classes, _age_idx(now - blocks.stamps, self._ends)])

    def saw_reuse(self, blocks: Traces, now: int, weight: int = 1) -> None:
        """These blocks are used again now; each stands for so many."""
        self._reuses.add(blocks, now, weight)

    def lost_sight(self, blocks: Traces, now: int, weight: int = 1) -> None:
        """These blocks were not used up to now, and will not be recognised any more; each stands for so many."""
        self._lost.add(blocks, now, weight)

    def learn(self, waiting: list[tuple[Traces, int]], now: int, request_len: float) -> None:
        """Computes the table anew. waiting: samples of the waiting blocks, with the number of blocks that each stands for."""
        reuses, lost = self._reuses.weights(), self._lost.weights()
        lost = lost + sum(every * _count(sample, now, self._ends) for sample, every in waiting)
        reached = np.cumsum((reuses + lost)[:, ::-1], axis=1)[:, ::-1] - lost / 2
        average = reuses.sum(0) / np.maximum(reached.sum(0), 1)
        mixed_in = _REQUESTS_MIXED_IN * request_len
        by_uses = (-1, CLASSES_PER_USE, NUM_AGES)
        course = (reuses.reshape(by_uses).sum(1) + mixed_in * average) / (reached.reshape(by_uses).sum(1) + mixed_in)
        course = np.repeat(course, CLASSES_PER_USE, axis=0)
        factors = (reuses.sum(1) + mixed_in) / ((reached * course).sum(1) + mixed_in)
        self.table = _best_ratio(course * factors[:, None])
        self._reuses.fade()
        self._lost.fade()


class _Events:
    """How often something happened in each cell, [NUM_CLASSES, NUM_AGES]."""

    def __init__(self, ends: Int64Array) -> None:
        self._ends = ends
        self._weights: FloatArray = np.zeros((NUM_CLASSES, NUM_AGES))
        self._kept: list[tuple[Traces, int, int]] = []
        self._num_uncounted = 0

    def add(self, blocks: Traces, now: int, weight: int) -> None:
        if not len(blocks.classes):
            return  # empty arrays would pile up until the next lesson, which may never come
        self._kept.append((blocks, now, weight))
        self._num_uncounted += len(blocks.classes)
        if self._num_uncounted > _MOST_UNCOUNTED:
            self._count()

    def weights(self) -> FloatArray:
        self._count()
        return self._weights

    def fade(self) -> None:
        self._weights *= _KEPT_WEIGHT

    def _count(self) -> None:
        for weight in {weight for _, _, weight in self._kept}:
            same = [(blocks, now) for blocks, now, other in self._kept if other == weight]
            classes = np.concatenate([blocks.classes for blocks, _ in same])
            turns = np.concatenate([blocks.turns for blocks, _ in same])
            ages = np.concatenate([now - blocks.stamps for blocks, now in same])
            self._weights += weight * _count(Traces(classes, turns, -ages), 0, self._ends)
        self._kept, self._num_uncounted = [], 0


def _age_idx(ages: Int64Array, ends: Int64Array) -> Int64Array:
    """Half octaves of units: 0 up to 1.4, then from 1.4, 2, 2.8, 4, 5.7 on ... ends: of all but the last."""
    return np.searchsorted(ends, ages, side="right")


def _count(blocks: Traces, now: int, ends: Int64Array) -> FloatArray:
    """The number of blocks in each cell; unknown blocks are left out."""
    known = blocks.turns > 0
    cells = blocks.classes[known].astype(np.int64) * NUM_AGES + _age_idx(now - blocks.stamps[known], ends)
    return np.bincount(cells, minlength=NUM_CLASSES * NUM_AGES).reshape(NUM_CLASSES, NUM_AGES).astype(np.float64)


def _best_ratio(chances: FloatArray) -> FloatArray:
    """[classes, ages] from chances per cell: max over ends of (chance of a reuse until then) / (expected time until then)."""
    chances = np.clip(chances, 0, 0.999)
    stays = np.cumprod(1 - chances, axis=1)  # at least 1e-96
    before = np.concatenate([np.ones((len(chances), 1)), stays[:, :-1]], axis=1)[:, :, None]
    reaches = np.where(_LATER, before.transpose(0, 2, 1) / before, 0)
    takes = np.cumsum(reaches * ((1 - chances / 2) * np.diff(_EDGES))[:, None, :], axis=2)
    returns = 1 - stays[:, None, :] / before
    ratios = np.where(_LATER, returns / np.where(_LATER, takes, 1), 0)
    return np.asarray(ratios.max(axis=2))
