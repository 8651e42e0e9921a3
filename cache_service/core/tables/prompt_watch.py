"""PromptWatch: how long prompts take to compute, from the start of a sequence to the commit of its prompt's last token.

That is what a sequence waits for its first token, as its engine runs it: in chunks, beside others. Owns the sequences that are
watched, which have started and not committed their prompt. Watches only where a tier below the host tier asks what computing
takes; sessions of all engines on the pool count as one. Costs a look at each of the few watched sequences after a step. Changes
nothing of the pool.
"""

from ..pool_state import PoolState
from ..tiers.worth import Line
from ..values.types import SequenceState

_MOST_WATCHED = 64
_RUNNING = int(SequenceState.RUNNING)


class PromptWatch:
    """How long the prompts of one pool take to compute."""

    def __init__(self, state: PoolState) -> None:
        self.is_on = False
        self.seconds = Line()  # that a prompt of so many tokens behind its hit takes
        self._sequences, self._clock = state.sequences, state.clock
        self._watched: dict[int, tuple[int, int, int, float]] = {}  # by slot: sequence, owner, hit, when it started

    @property
    def tokens_per_second(self) -> int:
        """The speed of a prompt's computation; 0 before it was measured."""
        each = self.seconds.each
        return min(round(1 / each), 2**31 - 1) if self.seconds.is_known and each else 0

    def note_start(self, slot: int, num_hit: int) -> None:
        """A sequence has started on a hit of so many tokens, and computes what is behind it."""
        seqs = self._sequences
        if len(self._watched) < _MOST_WATCHED or slot in self._watched:
            self._watched[slot] = int(seqs.ids[slot]), int(seqs.owners[slot]), num_hit, self._clock.now

    def look(self) -> None:
        """After a step."""
        if not self._watched:
            return
        seqs = self._sequences
        for slot, (sequence_id, owner, num_hit, started) in list(self._watched.items()):
            is_it = seqs.ids[slot] == sequence_id and seqs.owners[slot] == owner and seqs.states[slot] == _RUNNING
            num_prompt = int(seqs.num_prompt[slot])
            if is_it and seqs.num_committed[slot] < num_prompt:
                continue
            del self._watched[slot]
            if is_it and num_prompt > num_hit:
                self.seconds.add(num_prompt - num_hit, self._clock.now - started)
