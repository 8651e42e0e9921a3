"""The cost of taking a sequence's blocks and bringing it back: computed again, or moved to the host tier and back.

Both cost seconds in which the device computes nothing new. A swap also frees its blocks, and gets them back, a few steps later
than a release and a start, and a row's share of these steps is lost. The rates are measured elsewhere and come in as values:
tokens per second of prompts, bytes per second of transfer orders, seconds of a step, and the share of a preempted sequence's
cached tokens that were still there when it started again; they may be evicted when blocks are short. Pure.
"""

from dataclasses import dataclass
from enum import StrEnum

_SMOOTHING = 0.1
_NUM_PER_ROW = 4  # tokens for each row from which on a step is mostly prompts
_NUM_LATE_STEPS = 4  # two until the blocks are known to be free, and two until they are known to be back
_FORGETS = 1 / 32  # of what is known of hits, with every swap: then one is computed again, and it is measured anew


class Preemption(StrEnum):
    """How sequences give their blocks back. Without a host tier they are always computed again."""

    AUTO = "auto"  # whichever takes less time
    RECOMPUTE = "recompute"
    SWAP = "swap"  # where the host tier has room


@dataclass(frozen=True, slots=True)
class Victim:
    """A sequence that gives way, one of num_running.

    num_shareable: of its computed tokens, those in full blocks that it may hit when it starts again.
    """

    num_computed: int
    num_shareable: int
    num_blocks: int
    num_running: int = 1


@dataclass(frozen=True, slots=True)
class Moved:
    """What a step's transfer orders moved, and how long that took."""

    num_bytes: int = 0
    seconds: float = 0.0


def recompute_seconds(victim: Victim, tokens_per_second: float, hit_share: float) -> float:
    """Seconds to compute the tokens that are not hit."""
    return (victim.num_computed - hit_share * victim.num_shareable) / tokens_per_second


def swap_seconds(victim: Victim, block_bytes: int, bytes_per_second: float, step_seconds: float) -> float:
    """Seconds to move all blocks out and in again, and to wait for that."""
    waiting = _NUM_LATE_STEPS * step_seconds / victim.num_running
    return 2 * victim.num_blocks * block_bytes / bytes_per_second + waiting


class Rate:
    """Recent amounts per second: older measurements fade from the sums."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        self._amount += amount - _SMOOTHING * self._amount
        self._seconds += seconds - _SMOOTHING * self._seconds

    @property
    def per_second(self) -> float:
        """0 while nothing was measured."""
        return self._amount / self._seconds if self._seconds > 0 else 0.0


class Costs:
    """The rates, and the decision that follows from them."""

    def __init__(self) -> None:
        self.compute = Rate()  # tokens
        self.moves = Rate()  # bytes
        self.steps = Rate()
        self.hit_share = 1.0

    def note_step(self, num_rows: int, num_tokens: int, seconds: float, moved: Moved) -> None:
        """A step was computed. seconds: of all that the device did for it."""
        if num_rows:
            self.steps.note(1, seconds)
        if moved.num_bytes:
            self.moves.note(moved.num_bytes, moved.seconds)
        if num_rows and num_tokens >= _NUM_PER_ROW * num_rows:
            self.compute.note(num_tokens, max(seconds - moved.seconds, 0.0))

    def note_restart(self, num_hit: int, num_shareable: int) -> None:
        """A sequence that is computed again has started, and hit so many of its shareable tokens."""
        if num_shareable:
            self.hit_share += _SMOOTHING * (min(num_hit / num_shareable, 1.0) - self.hit_share)

    def prefers_swap(self, victim: Victim, preemption: Preemption, num_host_blocks: int, block_bytes: int) -> bool:
        """Whether to swap the sequence out. num_host_blocks: of the host tier, null block included; 0 without a host tier."""
        if preemption is Preemption.RECOMPUTE or not victim.num_computed or victim.num_blocks >= num_host_blocks:
            return False
        if preemption is Preemption.AUTO and not self._is_swap_cheaper(victim, block_bytes):
            return False
        self.hit_share += _FORGETS * (1.0 - self.hit_share)
        return True

    def _is_swap_cheaper(self, victim: Victim, block_bytes: int) -> bool:
        compute, moves = self.compute.per_second, self.moves.per_second
        if not compute or not moves:
            return bool(compute)  # the first swap measures how fast it is
        step_seconds = 1 / self.steps.per_second if self.steps.per_second else 0.0
        return swap_seconds(victim, block_bytes, moves, step_seconds) < recompute_seconds(victim, compute, self.hit_share)
