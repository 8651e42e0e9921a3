"""Reach: which hit rate caches of other sizes would have had over the last hour, an infinite one among them.

Owns what hit_curve.py says of pools of 0.25 to 8 times the size, and sketches of the blocks that prompts were looked up for,
and of those that finished sequences computed behind their prompts, in slices of five minutes, so that an hour slides. An
infinite cache misses a block that was never there before: those of both sketches together, without those that were computed
as output. What was there before the hour counts as new there, and so does what a tenant or KV spec of its own makes different;
of few blocks the sketches are exact to a block or two, of many to about a percent of the distinct ones. All rates count tokens
of whole prompts. Rules: nothing is done in a step but to note the tokens of a sequence that ends. They are hashed with prompts,
and these many at once, or when a slice ends or a caller asks: one by one, short prompts that come together would cost more here
than in the index. Knows no node and no block.

A sketch is a HyperLogLog: about how many distinct 64-bit hashes were added, in 8 KiB. The estimate is Ertl's, which is unbiased
from one hash on (O. Ertl, "New cardinality estimation algorithms for HyperLogLog sketches", 2017); its standard error is
1.04 / sqrt(8192), 1.15 %. Well-kept libraries take one item a call, and the core takes nothing but numpy: a prompt's hashes are
added here by a few array operations.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..values.clock import Clock
from ..values.counters import Counters
from ..values.types import Int32Array, Int64Array
from ..values.views import CurvePoint
from .hit_curve import SIZES, FloatArray, HitCurve, UInt64Array, hit_rates

_INDEX_BITS = 13
NUM_REGISTERS = 1 << _INDEX_BITS
_REST_BITS = 64 - _INDEX_BITS
Registers = npt.NDArray[np.uint8]  # [NUM_REGISTERS]


def no_registers() -> Registers:
    """The registers of an empty set."""
    return np.zeros(NUM_REGISTERS, np.uint8)


def add_hashes(registers: Registers, hashes: UInt64Array) -> None:
    """hashes [n]: every bit as good as random, equal for equal items."""
    rest = hashes & np.uint64((1 << _REST_BITS) - 1)
    # The exponent of a float is its bit length; one of 51 bits is exact.
    ranks = (_REST_BITS + 1 - np.frexp(rest.astype(np.float64))[1]).astype(np.uint8)
    np.maximum.at(registers, (hashes >> np.uint64(_REST_BITS)).astype(np.int64), ranks)


def num_distinct(registers: Registers) -> float:
    """About how many different hashes were added."""
    size = NUM_REGISTERS
    counts = np.bincount(registers, minlength=_REST_BITS + 2).tolist()
    if counts[0] == size:
        return 0.0
    total = size * _tau(1 - counts[_REST_BITS + 1] / size)
    for rank in range(_REST_BITS, 0, -1):
        total = 0.5 * (total + counts[rank])
    return size * size / (2 * math.log(2) * (total + size * _sigma(counts[0] / size)))


def _sigma(x: float) -> float:
    power, total, before = 1.0, x, -1.0
    while total != before:
        x *= x
        before = total
        total += x * power
        power += power
    return total


def _tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    power, total, before = 1.0, 1 - x, -1.0
    while total != before:
        x = math.sqrt(x)
        before = total
        power *= 0.5
        total -= (1 - x) ** 2 * power
    return total / 3


_SLICE_SECONDS, _NUM_SLICES = 300.0, 12
_MOST_NOTED = 256  # sequences that ended; while no prompt comes no more are needed
_MOST_PROMPTS, _MOST_PROMPT_TOKENS = 64, 1 << 15  # that are not hashed yet
_SEED = 0x9E3779B97F4A7C15


class ReachStats(NamedTuple):
    """Counts of the last hour; their names are those in PoolStats."""

    recent_hit_rate: float = 0.0
    reachable_hit_rate: float = 0.0
    num_recent_distinct_blocks: int = 0


class _Known(NamedTuple):
    """Whole blocks of tokens of one scope. first: the block from which on they are noted. number: in the order of notes."""

    root: int
    tokens: Int32Array
    first: int
    number: int
    is_made: bool = False  # behind a prompt


class _Slice:
    """Five minutes. hit_tokens and look_up_tokens: the pool's sums when it began."""

    def __init__(self, number: int, counters: Counters) -> None:
        self.number = number
        self.wanted, self.made = no_registers(), no_registers()
        self.num_tokens = self.num_blocks = 0  # of prompts that were created; whole blocks
        self.found: FloatArray = np.zeros(len(SIZES) + 1)  # look-ups, see HitCurve
        self.hit_tokens, self.look_up_tokens = counters.num_hit_tokens, counters.num_look_up_tokens


class Reach:
    """What an index without an end would find in one pool."""

    def __init__(self, block_size: int, clock: Clock, counters: Counters, num_blocks: int) -> None:
        """num_blocks: what the pool keeps in memory."""
        self._size, self._clock, self._counters = block_size, clock, counters
        self._curve = HitCurve(num_blocks)
        self._num_noted = 0
        self._slices: deque[_Slice] = deque()
        self._ended: deque[_Known] = deque(maxlen=_MOST_NOTED)
        self._prompts: list[_Known] = []  # of the last slice
        self._num_prompt_tokens = 0  # of them
        weights = np.random.default_rng(_SEED).integers(0, 1 << 63, block_size, np.uint64)
        self._weights = weights * np.uint64(2) + np.uint64(1)
        self._powers = np.ones(1, np.uint64)  # of an odd number, as many as the longest prompt had blocks

    def note_prompt(self, root: int, tokens: Int32Array) -> None:
        """A prompt will be looked up. root: a number of its scope alone."""
        now, num_blocks = self._slice(), self._num_looked_up(len(tokens))
        now.num_tokens += len(tokens)
        now.num_blocks += num_blocks
        self._num_noted += 1
        self._prompts.append(_Known(root, tokens[: num_blocks * self._size], 0, self._num_noted))
        self._num_prompt_tokens += num_blocks * self._size
        if len(self._prompts) >= _MOST_PROMPTS or self._num_prompt_tokens >= _MOST_PROMPT_TOKENS:
            self._hash_noted()

    def note_end(self, root: int, num_prompt: int, tokens: Int32Array) -> None:
        """A sequence has ended, which shares these tokens; they are kept as they are. num_prompt: of its prompt."""
        first = self._num_looked_up(num_prompt)
        if (num_blocks := len(tokens) // self._size) > first:
            self._num_noted += 1
            self._ended.append(_Known(root, tokens[: num_blocks * self._size], first, self._num_noted, is_made=True))

    def stats(self) -> ReachStats:
        """Takes a tenth of a millisecond, and as much for what is not hashed yet."""
        self._hash_noted()
        self._forget_old()
        if not self._slices:
            return ReachStats()
        made, both = no_registers(), no_registers()
        for each in self._slices:
            np.maximum(made, each.made, out=made)
            np.maximum(both, each.wanted, out=both)
        np.maximum(both, made, out=both)
        num_tokens = sum(each.num_tokens for each in self._slices)
        num_blocks = sum(each.num_blocks for each in self._slices)
        num_both = num_distinct(both)
        num_missed = min(max(num_both - num_distinct(made), 0.0), num_blocks)
        first, counters = self._slices[0], self._counters
        num_looked_up = counters.num_look_up_tokens - first.look_up_tokens
        return ReachStats(
            (counters.num_hit_tokens - first.hit_tokens) / num_looked_up if num_looked_up else 0.0,
            (num_blocks - num_missed) * self._size / num_tokens if num_tokens else 0.0,
            round(num_both),
        )

    def curve(self) -> list[CurvePoint]:
        """By size, in tokens of whole prompts. Takes as much as `stats` for what is not hashed yet."""
        self._hash_noted()
        self._forget_old()
        num_tokens = sum(each.num_tokens for each in self._slices)
        num_blocks = sum(each.num_blocks for each in self._slices)
        found = sum((each.found for each in self._slices), np.zeros(len(SIZES) + 1))
        share = num_blocks * self._size / num_tokens if num_tokens else 0.0
        return [CurvePoint(size, share * rate) for size, rate in zip(SIZES, hit_rates(found, num_blocks), strict=True)]

    def _num_looked_up(self, num_prompt: int) -> int:
        """Blocks of a prompt that a start may hit: it leaves a token to compute."""
        return (num_prompt - 1) // self._size

    def _slice(self) -> _Slice:
        number = int(self._clock.now / _SLICE_SECONDS)
        if not self._slices or self._slices[-1].number != number:
            self._hash_noted()
            self._slices.append(_Slice(number, self._counters))
            self._forget_old()
        return self._slices[-1]

    def _forget_old(self) -> None:
        oldest = int(self._clock.now / _SLICE_SECONDS) - _NUM_SLICES
        while self._slices and self._slices[0].number <= oldest:
            self._slices.popleft()

    def _hash_noted(self) -> None:
        """Hash the prompts of the last slice, and what ended since prompts were hashed last."""
        if not self._prompts:
            return
        now, noted = self._slices[-1], sorted([*self._prompts, *self._ended], key=lambda known: known.number)
        counts = np.array([len(each.tokens) // self._size for each in noted])
        begins = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) - np.repeat(begins, counts)
        hashes = self._hashes(noted, counts, begins, places)
        is_made = np.repeat([each.is_made for each in noted], counts)
        is_noted = places >= np.repeat([each.first for each in noted], counts)
        add_hashes(now.wanted, hashes[~is_made])
        add_hashes(now.made, hashes[is_made & is_noted])
        num_noted = counts - np.array([each.first for each in noted])
        now.found += self._curve.use(hashes[is_noted], num_noted, np.array([not each.is_made for each in noted]))
        self._prompts.clear()
        self._ended.clear()
        self._num_prompt_tokens = 0

    def _hashes(self, noted: Sequence[_Known], counts: Int64Array, begins: Int64Array, places: Int64Array) -> UInt64Array:
        """[n] one for each whole block of each: of all tokens up to the block's end and the scope."""
        tokens = np.concatenate([each.tokens for each in noted]).reshape(-1, self._size)
        blocks = _mixed(tokens.astype(np.uint64) @ self._weights)
        if (longest := int(counts.max())) > len(self._powers):
            odd = np.full(2 * longest, _SEED, np.uint64)
            odd[0] = 1
            self._powers = np.cumprod(odd, dtype=np.uint64)
        sums = np.zeros(len(blocks) + 1, np.uint64)  # of all that is before, so that one sum serves all of them
        np.cumsum(blocks * self._powers[places], dtype=np.uint64, out=sums[1:])
        roots = _mixed(np.array([each.root for each in noted], np.int64).view(np.uint64))
        return _mixed(sums[1:] - np.repeat(sums[begins], counts) + np.repeat(roots, counts))


def _mixed(numbers: UInt64Array) -> UInt64Array:
    """Every bit of the result depends on every bit of the number: the last steps of splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
