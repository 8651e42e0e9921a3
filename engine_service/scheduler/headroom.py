"""Headroom: the blocks left in the pool, as the cache service's answers report them, and which sequences start or give way.

Rules:
- A sequence that is refused a start or a swap-in keeps its place. No other sequence overtakes it twice, except one of higher
  priority where the policy heeds priorities.
- When running sequences run out of blocks, the latest arrival of the lowest priority gives its blocks back, and nothing starts
  until another sequence has ended, so that equals do not take turns.
- A critical sequence gives way only if no running sequence could go on otherwise.
- While the blocks of a swapped-out sequence are being moved, no other sequence gives way for lack of them.
- The only running sequence keeps its blocks, however long it waits. The cache service knows the oldest claim of all engines,
  and asks the other engines to give blocks back. They give back one sequence a step, until the claim has its reserved blocks.
  So two engines never wait for each other. Pure.
"""

from collections.abc import Sequence as SequenceOf

from ..values.request import Sequence
from .plan import StepAnswer

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
