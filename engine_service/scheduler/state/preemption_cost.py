"""What it costs to take a sequence's blocks away and to bring it back: computed again, or moved to the host tier and back.

Both are seconds that the device is busy with nothing new. A swap also frees its blocks, and has them back, some steps later
than a release and a start do, and a row's part of these steps is lost. The rates are measured and come in as values: tokens
that prompts were computed at, bytes that transfer orders moved, seconds of a step, and how much of what preempted sequences
left in the prefix cache was still there when they started again. Where blocks are short, it may be evicted by then. Pure.
"""

from dataclasses import dataclass
from enum import StrEnum

_SMOOTHING = 0.1
_NUM_PER_ROW = 4  # tokens for each row from which on a step is mostly prompts
_NUM_LATE_STEPS = 4  # two until the blocks are known to be free, and two until they are known to be back
_FORGETS = 1 / 32  # of what is known of hits, with every swap: then one is computed again, and it is measured anew


class Preemption(StrEnum):
    """How sequences give their blocks back. Without a host tier they are computed again, whatever is asked for."""

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
    """To compute what is not hit."""
    return (victim.num_computed - hit_share * victim.num_shareable) / tokens_per_second


def swap_seconds(victim: Victim, block_bytes: int, bytes_per_second: float, step_seconds: float) -> float:
    """To move all blocks out, and in again, and to wait for it."""
    waiting = _NUM_LATE_STEPS * step_seconds / victim.num_running
    return 2 * victim.num_blocks * block_bytes / bytes_per_second + waiting


class Rate:
    """Amounts per second, lately: in the sums, what is old fades."""

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
    """The rates, and the decision made of them."""

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
        """A sequence that was to be computed again has started, and hit so many of the tokens that it may."""
        if num_shareable:
            self.hit_share += _SMOOTHING * (min(num_hit / num_shareable, 1.0) - self.hit_share)

    def prefers_swap(self, victim: Victim, preemption: Preemption, num_host_blocks: int, block_bytes: int) -> bool:
        """Whether it is to be swapped out. num_host_blocks: that the host tier has, the null block included; 0 without one."""
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
