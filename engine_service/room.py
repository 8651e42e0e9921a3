"""Room: what the cache service's answers said of room in the pool, and who starts and who gives way because of it.

Rules. Who is refused a start keeps its place, and nobody overtakes it twice. When running sequences run out of blocks,
the youngest of the lowest priority gives its blocks back, and nothing starts until another sequence has ended, so that
equals do not take turns. The only one that runs keeps its blocks; but when it gets no further for long, because other
engines on the pool hold the rest, it gives way too, and comes back when there is room for all that it can come to: two
engines that wait for each other would wait for ever. Pure.
"""

import random
from collections.abc import Sequence as SequenceOf

from engine_service.plan import StepAnswer
from engine_service.request import Sequence, SequenceState

_PATIENCE_STEPS = (100, 300)  # about a second: the loop pauses between steps that were refused everything


class Room:
    """See the module. seed is of the patience that engines must not share; None draws one."""

    def __init__(self, block_size: int, seed: int | None = None) -> None:
        self._block_size = block_size
        self._num_available: int | None = None  # blocks that could be had, as of the last answer
        self._starts_are_held = False
        self._refused: Sequence | None = None
        self._gave_way: Sequence | None = None
        self._waited_for_fences = False
        self._random = random.Random(seed)
        self._patience = self._draw_patience()

    @property
    def is_giving_way(self) -> bool:
        """A sequence gave way to other engines, and has not come back."""
        return self._gave_way is not None and self._gave_way.state is not SequenceState.ENDED

    # -- asked when a step is planned

    def allows_starts(self, num_growing: int) -> bool:
        """Beside sequences that run and grow by so many blocks."""
        is_short = self._num_available is not None and num_growing >= self._num_available
        return not (self._starts_are_held or is_short)

    def keeps_waiting(self, sequence: Sequence) -> bool:
        """It gave way, and there is no room for all of it yet."""
        num_blocks = -(-sequence.request.max_len // self._block_size)
        return sequence is self._gave_way and (self._num_available or 0) < num_blocks

    def was_refused(self, sequence: Sequence) -> bool:
        """It found no room when it was first in the queue: nobody behind it may try."""
        return sequence is self._refused

    # -- told when a step is answered

    def note_answer(self, answer: StepAnswer) -> None:
        self._num_available = answer.num_free + answer.num_evictable + answer.num_fenced

    def note_starts(self, started: SequenceOf[Sequence], refused: SequenceOf[Sequence]) -> None:
        """What became of the starts of a step that had some."""
        self._refused = refused[0] if refused else None
        if self._gave_way in started:
            self._gave_way = None

    def note_end(self) -> None:
        """A sequence gave its blocks back because it had ended."""
        self._starts_are_held = False

    def note_growth(self) -> None:
        """All running sequences got what they asked for."""
        self._patience, self._waited_for_fences = self._draw_patience(), False

    def choose_victim(self, running: SequenceOf[Sequence], answer: StepAnswer) -> Sequence | None:
        """Who of the running ones, in order of importance, gives its blocks back now that one was refused."""
        if len(running) > 1:
            if answer.num_fenced and not self._waited_for_fences:
                self._waited_for_fences = True  # they come free with the next step: look once more first
                return None
            self._waited_for_fences = False
        else:
            self._patience -= 1
            if self._patience > 0 or not running:
                return None
            self._patience = self._draw_patience()
            self._gave_way = running[0]
        self._starts_are_held = True
        return running[-1]

    def _draw_patience(self) -> int:
        return self._random.randint(*_PATIENCE_STEPS)
