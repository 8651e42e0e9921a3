"""What the reference model makes of the one-item calls: each a step of one item with device work that is complete at once.

A call answers no table, so each method is shown the table that the pool shows afterwards and judges whether it may be so.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.reference.naive_cache import NaiveSequence, expect
from tests.support.reference.naive_steps import NaiveSteps

Pair = tuple[int, int]


class NaiveCalls(NaiveSteps):
    """The reference model, with the calls of a one-item session."""

    def fits(self, q: NaiveSequence, num_tokens: int, *, look_up: bool) -> bool:
        """Whether an extend to num_tokens gets its blocks, all of them."""
        match, num_short = self._shortage(q, num_tokens, look_up=look_up)
        if self.is_later(q):
            num_needed = num_short + self.num_available()
            return q.running and num_needed <= max(0, self.num_available() - self.num_reserved())
        return num_short <= 0 or self.can_give_way(q, num_short, match)

    def extend(
        self, q: NaiveSequence, num_tokens: int, shown: list[int], copies: list[Pair] | None, *, look_up: bool
    ) -> list[int]:
        """Returns the blocks that are new in the table; copies is None where the service does not tell them."""
        with self._one_step(q):
            name = f"extend of {q.sequence_id}"
            match, num_short = self._shortage(q, num_tokens, look_up=look_up)
            self.give_way(q, num_short, match)
            if not q.running:
                return self._start_exactly(q, num_tokens, shown, copies, look_up=look_up, name=name)
            q_reserved = max(q.reserved, num_tokens)
            copied_idx = self.must_copy(q, q_reserved)
            before = list(q.table)
            expect(len(shown), self.num_blocks(q_reserved), f"R2 {name}")
            fresh = shown[len(before) :]
            if copied_idx is not None:
                fresh = [shown[copied_idx], *fresh]
                self.num_copies += 1
            self.grant(fresh, q.scope, name)
            if copied_idx is not None:
                self.let_go(q.session, before[copied_idx], still_used=True)
                before[copied_idx] = shown[copied_idx]
                self.foreign = [block for block in self.foreign if block != shown[copied_idx]]
            expect(shown[: len(before)], before, f"R5 {name}: the table it had")
            wanted = [] if copied_idx is None else [(q.table[copied_idx], shown[copied_idx])]
            self._check_copies(copies, wanted, name)
            self.num_changes += q_reserved > q.reserved or copied_idx is not None
            q.table, q.reserved = list(shown), q_reserved
            q.granted_at = {self.sessions[q.session].step_id: q_reserved}
            return fresh

    def commit_one(self, q: NaiveSequence, num_tokens: int, new_tokens: list[int], shown: list[int]) -> None:
        with self._one_step(q):
            self.commit(q.session, [(q.sequence_id, num_tokens, new_tokens)])
        expect(q.table, shown, f"table of {q.sequence_id} after a commit")

    def fork_one(self, parent: NaiveSequence, child_id: int, num_tokens: int) -> NaiveSequence:
        with self._one_step(parent):
            return self.fork(parent, child_id, num_tokens)

    def truncate_one(self, q: NaiveSequence, num_tokens: int) -> None:
        with self._one_step(q):
            self.truncate(q, num_tokens)

    def release_one(self, q: NaiveSequence) -> int:
        with self._one_step(q):
            self.say([q])
            return self.release(q)

    def _start_exactly(
        self, q: NaiveSequence, num_tokens: int, shown: list[int], copies: list[Pair] | None, *, look_up: bool, name: str
    ) -> list[int]:
        match = self._match_for(q, num_tokens, look_up=look_up)
        hit = len(match) * self.block_size
        reserved = max(hit, num_tokens)
        expect(len(shown), self.num_blocks(reserved), f"R2 {name}")
        expect(shown[: len(match)], match, f"R4 blocks hit by the {name}")
        if look_up and self.config.prefix_caching:
            self.misses.note(self, q, num_tokens, len(match))
        q.table, q.running = list(match), True
        self.claim_blocks(q, match)
        self.grant(shown[len(match) :], q.scope, name)
        self.evict(name)
        self._check_copies(copies, [], name)
        q.table, q.committed, q.reserved, q.hit, q.published = list(shown), hit, reserved, hit, len(match)
        q.granted_at = {self.sessions[q.session].step_id: reserved}
        self.num_changes += 1
        return shown[len(match) :]

    def _shortage(self, q: NaiveSequence, num_tokens: int, *, look_up: bool) -> tuple[list[int], int]:
        """The hit of an extend, and how many blocks it lacks beside it."""
        if q.running:
            target = max(q.reserved, num_tokens)
            num_needed = self.num_blocks(target) - len(q.table) + (self.must_copy(q, target) is not None)
            return [], num_needed - self.num_available()
        match = self._match_for(q, num_tokens, look_up=look_up)
        num_needed = self.num_blocks(num_tokens) - len(match)
        if num_needed <= 0:
            return match, 0  # a hit alone takes no new block
        return match, num_needed - self.room_beside(match) + self.watermark()

    def _match_for(self, q: NaiveSequence, num_tokens: int, *, look_up: bool) -> list[int]:
        limit = min(num_tokens, len(q.tokens) - 1) if look_up else 0
        return self.hit(q, limit)

    def _check_copies(self, copies: list[Pair] | None, wanted: list[Pair], name: str) -> None:
        if copies is None:  # not told: the oracle sees whether they were right
            self.foreign = []
            return
        found = self.split_copies([source for source, _ in copies], [destination for _, destination in copies])
        expect(found, wanted, f"R5 copies of {name}")
        self.check_cleared()

    @contextmanager
    def _one_step(self, q: NaiveSequence) -> Iterator[None]:
        """A step of its own, complete at once; what was pending was published before it."""
        self.clock += 1
        self.sessions[q.session].step_id += 1
        self.complete(q.session, self.sessions[q.session].step_id - 1)
        yield
        self.evict(f"call on {q.sequence_id}")
        self.observe()
        self.publish()
        self.observe()
        self.sessions[q.session].updates.clear()
        self.complete(q.session, self.sessions[q.session].step_id)
        self.settle()
        self.observe()
