"""Forks: sequences that have a first token of their own and share all tokens before it with a running parent.

They wait unforked until a step has rows and slots for them. If the parent gives its blocks back first, or no longer keeps all
tokens that a fork would read, they start alone, with their own tokens. Pure.
"""

from ..values.request import Int32Array, Sequence
from .state.scheduler_state import SchedulerState


class Forks:
    """Decides which unforked sequences a step forks, and which have to start alone."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def plan(self, num_free_rows: int, most: int) -> list[Sequence]:
        """At most so many unforked sequences for which there are rows and slots; lists of a search have reserved rows."""
        state = self._state
        if not state.unforked:
            return []
        most = min(most, state.limits.max_known_sequences - state.waiting.num_known)
        forks: list[Sequence] = []
        for child in state.unforked:
            if len(forks) >= most:
                break
            if not self._may_fork(child, state.running.num_computed):
                continue
            if child.request.num_beams is None:
                if num_free_rows <= 0:
                    continue
                num_free_rows -= 1
            forks.append(child)
        return forks

    def _may_fork(self, child: Sequence, committed: Int32Array) -> bool:
        """Whether the parent, with so many tokens committed by row, still keeps all tokens that a fork would read."""
        retention, limits = child.request.retention, self._state.limits
        if child.parent is None:
            return True
        shared = len(child.token_ids) - 1
        if limits.num_groups > 1 and not limits.may_cut(int(committed[child.parent.row]), shared):
            return False
        if limits.has_states and self._state.running.num_reserved[child.parent.row] > shared:
            return False  # its state has gone on; a start finds the last one that is kept
        if retention is None:
            return True
        return retention.may_fork(int(committed[child.parent.row]), shared, limits.block_size)

    def shared_table(self, child: Sequence, num_tokens: int) -> Int32Array:
        """The part of the parent's block tables that a child forked now shares, of so many tokens."""
        assert child.parent is not None
        num_blocks = -(-num_tokens // self._state.limits.block_size)
        assert child.parent.row is not None
        return self._state.running.table_of(child.parent.row, num_blocks)

    def start_children_alone(self, parent: Sequence) -> None:
        """A parent gives its blocks back: its unforked children start alone."""
        for child in [child for child in self._state.unforked if child.parent is parent]:
            self.start_alone(child)

    def start_unforkable_alone(self) -> None:
        """Children start alone if their parent has committed beyond the window that a fork would read."""
        state = self._state
        if state.unforked and (state.running.num_retaining or state.limits.num_groups > 1):
            for child in [child for child in state.unforked if not self._may_fork(child, state.running.num_committed)]:
                self.start_alone(child)

    def start_alone(self, child: Sequence) -> None:
        """Queue a child that starts with its own tokens, not as a fork."""
        self.detach(child)
        self._state.waiting.put(child)

    def detach(self, child: Sequence) -> None:
        """The child needs its parent no more: it is forked, or starts alone."""
        del self._state.unforked[child]
        child.parent = None
