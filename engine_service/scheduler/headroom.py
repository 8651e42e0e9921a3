"""Headroom: the blocks left in the pool, as the cache service's answers report them, and which sequences start or give way; and
Costs: what it costs to take a sequence's blocks and bring it back, computed again, or moved to the host tier and back.

Rules:
- A sequence that is refused a start or a swap-in keeps its place. No other sequence overtakes it twice, except one of higher
  priority where the policy heeds priorities.
- When running sequences run out of blocks, the latest arrival of the lowest priority gives its blocks back, and nothing starts
  until another sequence has ended, so that equals do not take turns.
- A critical sequence gives way only if no running sequence could go on otherwise.
- While the blocks of a swapped-out sequence are being moved, no other sequence gives way for lack of them.
- The only running sequence keeps its blocks, however long it waits. The cache service knows the oldest claim of all engines,
  and asks the other engines to give blocks back. They give back one sequence a step, until the claim has its reserved blocks.
  So two engines never wait for each other.

Computing again and swapping both cost seconds in which the device computes nothing new. A swap also frees its blocks, and gets
them back, a few steps later than a release and a start, and a row's share of these steps is lost. The rates are measured
elsewhere and come in as values: tokens per second of prompts, bytes per second of transfer orders, seconds of a step, and the
share of a preempted sequence's cached tokens that were still there when it started again; they may be evicted when blocks are
short. Pure.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import StrEnum

from ..values.request import Sequence
from .plan import StepAnswer

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


CRITICAL = 1000  # a sequence of this priority is not preempted for others
_NUM_ANSWERS = 3  # after which the blocks of a swap-out show: one has the orders, one comes while they run, one says so


class Headroom:
    """The blocks that the pool has left, as far as known, and the decisions that follow."""

    def __init__(self) -> None:
        self._num_available: int | None = None  # blocks that could be had, as of the last answer
        self._starts_are_held = False
        self._refused: Sequence | None = None
        self._waited_for_fences = False
        self._coming: list[tuple[int, int]] = []  # answer with which blocks of a swap-out show, and how many
        self._num_answers = 0

    # -- asked when a step is planned

    def allows_starts(self, num_growing: int) -> bool:
        """Whether a sequence may start beside running sequences that grow by so many blocks."""
        is_short = self._num_available is not None and num_growing >= self._num_available
        return not (self._starts_are_held or is_short)

    def was_refused(self, sequence: Sequence) -> bool:
        """The sequence found no room in its turn: no sequence behind it may try."""
        return sequence is self._refused

    @property
    def most_at_once(self) -> int:
        """Blocks that one of several sequences may take if it could do with fewer: half of those left."""
        return (self._num_available or 0) // 2

    @property
    def refused_start(self) -> bool:
        """A start of the last step found no room."""
        return self._refused is not None

    # -- noted when the answer to a step comes

    def note_answer(self, answer: StepAnswer) -> None:
        self._num_available = answer.num_free + answer.num_evictable + answer.num_fenced
        self._num_answers += 1
        if self._coming:
            self._coming = [item for item in self._coming if item[0] > self._num_answers]

    def note_starts(self, refused: SequenceOf[Sequence]) -> None:
        """The refused starts of a step that had starts.

        The cache service grants no start before the oldest claim, in its own order, so that claim is waited for.
        """
        self._refused = min(refused, key=_claim, default=None)

    def note_end(self) -> None:
        """A sequence gave its blocks back because it had ended."""
        self._starts_are_held = False

    def note_swap_out(self, num_blocks: int) -> None:
        """The next step swaps a sequence out; so many blocks come free once they are moved."""
        self._coming.append((self._num_answers + _NUM_ANSWERS, num_blocks))

    def note_release(self, num_blocks: int) -> None:
        """The next step releases a sequence that came back to the device after a failed swap-out."""
        self._coming.append((self._num_answers + 1, num_blocks))

    def note_growth(self) -> None:
        """All running sequences got the blocks that they asked for."""
        self._waited_for_fences = False

    def choose_victim(self, running: SequenceOf[Sequence], answer: StepAnswer, *, is_stuck: bool) -> Sequence | None:
        """The sequence that gives its blocks back, after a refusal or for the oldest claim of another engine; None: none does.

        running: in order of importance; the last one gives way.
        is_stuck: this step computes nothing for any of them.
        """
        if self._coming and answer.num_reclaim_hint <= sum(num_blocks for _, num_blocks in self._coming):
            return None
        if running and running[-1].request.priority >= CRITICAL and not is_stuck:
            return None
        if not answer.num_reclaim_hint:  # what is asked back is missing even when all that is fenced has come free
            if len(running) < 2:
                return None
            if answer.num_fenced and not self._waited_for_fences:
                self._waited_for_fences = True  # they come free with the next step: look once more first
                return None
        self._waited_for_fences = False
        self._starts_are_held = True
        return running[-1] if running else None


def _claim(sequence: Sequence) -> tuple[int, int, tuple[float, int, int]]:
    return -sequence.request.priority, sequence.request.start_number, sequence.place
