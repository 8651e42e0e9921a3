"""What the reference model makes of each operation: a Step, the one-item calls, the end of a session.

Rules: operations are applied in the protocol's order, items in list order; every answer of the core is compared. A batch
given to `step` is one that the protocol allows; the test that breaks the protocol checks the refusal.
"""

from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.core.values.sequence_args import Retention, SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import NULL_BLOCK, BlockState, Executor, ItemResult, ReuseHint, StartResult
from tests.support.reference.naive_cache import NaiveSequence, NaiveSession, expect, require, tenant_of
from tests.support.reference.naive_claims import NaiveClaims

Update = tuple[int, int, int]  # sequence id, table index, block


SEQUENCE_COST = 16  # a sequence is as much work as so many blocks
AT_ONCE = 4096  # blocks that are given back for a slot


class NaiveSteps(NaiveClaims):
    """The reference model, with its operations."""

    num_opened = 0
    refused: list[tuple[NaiveSequence, int]] = []  # noqa: RUF012  # reservations of this step, with the blocks they asked for

    def open_session(self, session: str, executor: Executor) -> None:
        self.num_opened += 1
        self.sessions[session] = NaiveSession(executor, self.num_opened)

    def create(self, session: str, args: SequenceArgs) -> NaiveSequence:
        num_holders = len(self.holders)
        while num_holders == self.config.max_sequences == len(self.holders):
            self.reclaim(AT_ONCE)
        self.seen_tenants.add(tenant_of(args.scope))
        tokens = [int(token) for token in args.token_ids]
        limit = args.max_tokens or self.config.limit_with(args.retention)
        key = (tuple(tokens), limit, args.scope, args.priority, args.retention, args.reuse_hint, args.retain_seconds)
        q = NaiveSequence(session, int(args.sequence_id), args.scope, tokens, limit, key, retention=args.retention)
        self.heed(args.reuse_hint)
        q.hint, q.retain_seconds = args.reuse_hint, args.retain_seconds
        self.last_number += not args.start_number
        q.priority, q.start_number = args.priority, args.start_number or self.last_number
        self.sequences[session, q.sequence_id] = q
        self.num_changes += 1
        return q

    def close(self, session: str, *, may_still_write: bool) -> tuple[int, int]:
        """Returns (sequences released, blocks in quarantine): what a step in flight may still write is not reused."""
        self.clock += 1
        self.publish()
        self.observe()
        sequences = self.of(session)
        behind = {block for block, fences in self.fences.items() if session in fences}
        behind |= {block for block, (fills, _) in self.filling.items() if fills == session}
        if self.sessions[session].executor is Executor.ENGINE:  # clears that it was ordered may not have run (R8)
            self.tenants.update({block: None for block, (fills, _) in self.filling.items() if fills == session})
        self.complete(session, self.sessions[session].step_id)
        if may_still_write:
            self.may_write.add(session)
            self._quarantine(session, behind)
        self.commits = [(clock, q) for clock, q in self.commits if q.session != session]
        for q in sorted(sequences, key=lambda q: q.sequence_id):
            del self.sequences[session, q.sequence_id]
            self.num_changes += 1
            self.closing.append(q)
        self._reclaim(self.reclaim_at_once)
        for pin_id in [pin_id for pin_id, pin in self.pins.items() if pin.session == session]:
            self.unpin(pin_id)
        del self.sessions[session]
        self.settle()
        self.observe()
        return len(sequences), sum(session in owners for owners in self.quarantine.values())

    def reclaim(self, max_blocks: int) -> bool:
        """Gives back what is left of sessions that ended: whole sequences, or the end of a long one. Whether more is left."""
        self.clock += 1
        self._reclaim(max_blocks)
        self.settle()
        return bool(self.closing)

    def _reclaim(self, max_blocks: int) -> None:
        while self.closing and max_blocks > 0:
            first, left = self.closing[0], max_blocks
            if len(first.table) > max_blocks and first.retention is None:
                self.say([first])
                first.has_said = True
                self._give_back(first, len(first.table) - max_blocks)
                return
            together: list[NaiveSequence] = []
            for q in self.closing:
                cost = len(q.table) + SEQUENCE_COST
                if q.session != first.session or (together and cost > left):
                    break
                together.append(q)
                left -= cost
            self.say(together)
            for q in together:
                self.closing.remove(q)
                self._give_back(q, 0)
            max_blocks = left

    def _give_back(self, q: NaiveSequence, num_kept: int) -> None:
        """Blocks from a table index on: its session may still write those behind its committed length."""
        dropped = q.table[num_kept:]
        if q.session in self.may_write:
            self._quarantine(q.session, set(q.writable(self.block_size)) & set(dropped))
        for block in dropped:
            self.ages.pop(block, None)
        del q.table[num_kept:], q.tokens[num_kept * self.block_size :]
        q.committed, q.published = min(q.committed, num_kept * self.block_size), min(q.published, num_kept)

    def _quarantine(self, session: str, blocks: set[int]) -> None:
        for block in blocks - set(self.index.values()):  # nothing writes an indexed block (R5)
            self.quarantine.setdefault(block, set()).add(session)

    def end_quarantine(self, session: str) -> None:
        self.clock += 1
        self.may_write.discard(session)
        had_any = any(session in owners for owners in self.quarantine.values())
        self.quarantine = {b: left for b, owners in self.quarantine.items() if (left := owners - {session})}
        self.settle()
        if had_any:
            self.observe()

    # Steps

    def step(self, session: str, batch: StepBatch, reply: StepReply) -> None:
        """Applies a batch that the core applied too, and compares."""
        self.clock += 1
        self.complete(session, batch.completed_step_id)
        self.sessions[session].step_id = batch.step_id
        self.settle()
        found = list(
            zip(reply.update_ids.tolist(), reply.update_table_idx.tolist(), reply.update_block_ids.tolist(), strict=True)
        )
        leaving = [
            self.sequences[session, sequence_id] for sequence_id in batch.release_ids.tolist() if not len(batch.fork_children)
        ]
        self.commit(session, commits_of(batch))
        if len(batch.fork_children) or len(batch.truncate_ids) or self._could_hit_more(session, batch):
            self.publish(reported_now=session)
        else:
            self.publish_those(leaving)
        told = self.told(session)
        refused = self._forks(session, batch, reply)
        for sequence_id, length in zip(batch.truncate_ids.tolist(), batch.truncate_lens.tolist(), strict=True):
            if sequence_id not in refused:
                self.truncate(self.sequences[session, sequence_id], length)
        released = [i for i in batch.release_ids.tolist() if i not in refused]
        self.say([self.sequences[session, sequence_id] for sequence_id in released])
        for sequence_id in released:
            self.release(self.sequences[session, sequence_id])
        self.settle()
        self._starts(session, batch, reply)
        updates = self._reservations(session, batch, reply, refused)
        updates += told
        self.settle()
        expect(sorted(found), sorted(updates), "table updates")
        self.end_of_step(session)
        self.check_counts(reply)
        self.observe()
        expect(reply.pressure, self.pressure, "pressure")
        expect(reply.num_reclaim_hint, self.reclaim_hint(session), "reclaim hint")
        self.num_given_back += reply.num_reclaim_hint > 0

    def check_counts(self, reply: StepReply) -> None:
        states = self.states()
        expect(reply.num_free, states.count(BlockState.FREE), "R1 free blocks")
        expect(reply.num_evictable, states.count(BlockState.CACHED), "R1 evictable blocks")
        expect(reply.num_fenced, states.count(BlockState.FENCED), "R1 fenced blocks")

    def commit(self, session: str, items: list[tuple[int, int, list[int]]]) -> None:
        for sequence_id, length, new_tokens in items:
            q = self.sequences[session, sequence_id]
            self.num_changes += bool(new_tokens) or length > q.committed
            q.tokens += new_tokens
            q.committed = length
            if self.config.prefix_caching:
                self.commits.append((self.clock, q))
        self.retain(session, [self.sequences[session, sequence_id] for sequence_id, _, _ in items])

    def narrow(self, q: NaiveSequence, retention: Retention) -> None:
        """UpdateSequence: so far attention was whole, so what is committed is published before."""
        self.clock += 1
        self.num_changes += retention != q.retention
        if retention != q.retention:
            self.publish()
            self.observe()
            q.retention = retention
            self.retain(q.session, [q], reported_now=False)
        self.settle()

    def change_hint(self, q: NaiveSequence, hint: ReuseHint) -> None:
        """UpdateSequence."""
        self.num_changes += hint != q.hint
        self.heed(hint if hint != q.hint else None)
        if hint != q.hint and self.children is None:
            self.children = {}
        q.retain_seconds *= hint is q.hint
        q.hint = hint
        self.claim_blocks(q, q.table[: q.published])

    def retain(self, session: str, sequences: list[NaiveSequence], *, reported_now: bool = True) -> None:
        """Blocks without a readable position become holes; what may be shared of them is published before."""
        size = self.block_size
        due: list[tuple[NaiveSequence, int]] = []
        for q in sequences:
            if q.retention is not None:
                needed = {position // size for position in q.readable(q.committed)}
                due += [(q, idx) for idx in range(q.committed // size) if idx not in needed and q.table[idx]]
        if due:
            self.publish(reported_now=session if reported_now else "")
        for q, idx in due:
            self.let_go(session, q.table[idx], still_used=not reported_now)
            q.table[idx] = NULL_BLOCK
            q.published = min(q.published, idx)
            self.sessions[session].updates.append((q.sequence_id, idx, NULL_BLOCK))
        self.num_retention_dropped += len(due)

    def told(self, session: str) -> list[Update]:
        """The replaced table entries that the session hears of now: those that still hold."""
        updates = self.sessions[session].updates
        holding = [(i, at, block) for i, at, block in updates if self.shows(session, i, at, block)]
        updates.clear()
        return holding

    def shows(self, session: str, sequence_id: int, block_idx: int, block: int) -> bool:
        q = self.sequences.get((session, sequence_id))
        return q is not None and q.table[block_idx : block_idx + 1] == [block]

    def fork(self, parent: NaiveSequence, child_id: int, length: int) -> NaiveSequence:
        """The child shares the blocks of its tokens, a partial one too."""
        child = NaiveSequence(parent.session, child_id, parent.scope, parent.tokens[:length], parent.max_tokens)
        child.running, child.retention = True, parent.retention
        child.committed = child.reserved = length
        child.hit = parent.hit
        child.priority, child.start_number = parent.priority, parent.start_number
        child.hint, child.retain_seconds = parent.hint, parent.retain_seconds
        child.table = parent.table[: self.num_blocks(length)]
        child.published = min(length // self.block_size, parent.published)
        child.granted_at = {self.sessions[parent.session].step_id: length}
        child.args = ("fork", parent.sequence_id, length)
        self.sequences[parent.session, child_id] = child
        self.num_changes += 1
        return child

    def truncate(self, q: NaiveSequence, length: int) -> None:
        self.num_changes += length < max(len(q.tokens), q.reserved)
        del q.tokens[length:]
        q.committed, q.reserved = min(q.committed, length), min(q.reserved, length)
        q.published = min(q.published, q.committed // self.block_size)
        q.granted_at = {step: min(granted, length) for step, granted in q.granted_at.items()}
        for block in q.table[self.num_blocks(q.reserved) :]:
            self.let_go(q.session, block)
        del q.table[self.num_blocks(q.reserved) :]

    def release(self, q: NaiveSequence) -> int:
        """Returns how many of its blocks no other table names."""
        del self.sequences[q.session, q.sequence_id]
        self.promised.pop((q.session, q.sequence_id), None)
        self.commits = [(clock, other) for clock, other in self.commits if other is not q]
        self.num_changes += 1
        for block in q.table:
            self.let_go(q.session, block)
        return sum(not self.num_holders(block) for block in q.table if block != NULL_BLOCK)

    def _could_hit_more(self, session: str, batch: StepBatch) -> bool:
        """Whether a start would find more if everything that is committed were published."""
        starts = zip(batch.start_ids.tolist(), batch.start_max_hit.tolist(), strict=True)
        return any(self.could_grow(self.sequences[session, sequence_id], max_hit) for sequence_id, max_hit in starts)

    def _forks(self, session: str, batch: StepBatch, reply: StepReply) -> set[int]:
        """Returns the children that there was no slot for: later items that name one do nothing."""
        refused: set[int] = set()
        expect(len(reply.fork_results), len(batch.fork_parents), "fork results")
        columns = (batch.fork_parents, batch.fork_children, batch.fork_lens, reply.fork_results)
        for parent, child, length, result in zip(*(column.tolist() for column in columns), strict=True):
            room = parent not in refused and len(self.holders) < self.config.max_sequences
            expect(result, ItemResult.OK if room else ItemResult.NO_ROOM, f"fork of {parent}")
            if room:
                self.fork(self.sequences[session, parent], child, length)
            else:
                refused.add(child)
        return refused

    def _starts(self, session: str, batch: StepBatch, reply: StepReply) -> None:
        tables = iter(reply.start_block_ids.tolist())
        may_wait = batch.start_may_wait if len(batch.start_may_wait) else np.zeros(len(batch.start_ids), np.int32)
        columns = (batch.start_ids, batch.start_max_new, batch.start_max_hit, reply.start_results, reply.start_hits,
                   reply.start_reserved, reply.start_num_blocks, may_wait)  # fmt: skip
        items = zip(*(c.tolist() for c in columns), strict=True)
        for sequence_id, max_new, max_hit, result, hit, reserved, count, waits in items:
            table = [next(tables) for _ in range(count)]
            q = self.sequences[session, sequence_id]
            if waits and (length := self.computing(q, max_hit)):
                found = (result, hit, reserved, count)
                expect(found, (StartResult.COMPUTING, length, 0, 0), f"start of {sequence_id}, which may wait")
                q.claim, self.num_computing = None, self.num_computing + 1
                continue
            started = self.start(self.sequences[session, sequence_id], max_new, max_hit, hit, reserved, table)
            expect(result, StartResult.STARTED if started else StartResult.NO_ROOM, f"start of {sequence_id}")
        require(next(tables, None) is None, "more start blocks than tables")
        now = self.sessions[session].step_id
        has_logits = [self.promised.get((session, i), (0, b""))[0] == now for i in batch.start_ids.tolist()]
        expect(reply.start_has_logits.tolist(), has_logits if any(has_logits) else [], "starts with logits")

    def watermark(self) -> int:
        """Blocks kept free when admitting; none when nothing runs."""
        if not any(q.running for q in self.holders):
            return 0
        return int(self.config.watermark * self.config.num_usable_blocks)

    def start(self, q: NaiveSequence, max_new: int, max_hit: int, hit: int, reserved: int, table: list[int]) -> bool:
        """Look-up, pin and first reservation are one decision. Compares with what the core answered."""
        size, limit = self.block_size, min(max_hit, len(q.tokens) - 1)
        logits = self.full_hit(q, max_hit)
        match = self.hit(q, limit + (logits is not None))
        if logits is None and not self.is_later(q):
            self.give_way(q, 1 - self.room_beside(match) + self.watermark(), match)
        room = self.room_beside(match) - self.watermark() if logits is None else 1  # a full hit takes no new block
        wanted = min(len(match) * size + max_new, len(q.tokens))
        granted = min(wanted, (len(match) + room) * size)
        if room <= 0 or self.is_later(q):
            self.num_kept += room > 0
            apart = self.num_available() - self.room_beside(match) + self.watermark()
            self.claim(q, max(1, self.num_blocks(wanted) - len(match) + apart))
            expect((hit, reserved, table), (0, 0, []), f"R7 start of {q.sequence_id} without room")
            return False
        q.claim = None
        if max_hit and self.config.prefix_caching:
            self.misses.note(self, q, max_hit, len(match))
        if logits is not None:
            self.promised[q.session, q.sequence_id] = self.sessions[q.session].step_id, logits
        expect(hit, len(match) * size, f"R4 hit of {q.sequence_id}")
        expect(reserved, granted, f"slots granted to the start of {q.sequence_id}")
        expect(len(table), self.num_blocks(granted), f"R2 table of {q.sequence_id}")
        expect(table[: len(match)], match, f"R4 blocks hit by {q.sequence_id}")
        q.table, q.running = list(match), True
        self.claim_blocks(q, match)
        self.grant(table[len(match) :], q.scope, f"start of {q.sequence_id}")
        self.evict(f"start of {q.sequence_id}")
        q.table, q.committed, q.reserved, q.hit, q.published = table, hit, reserved, hit, len(match)
        q.granted_at = {self.sessions[q.session].step_id: reserved}
        self.num_hit_tokens += hit
        self.num_changes += 1
        return True

    def _reservations(self, session: str, batch: StepBatch, reply: StepReply, refused: set[int]) -> list[Update]:
        updates: list[Update] = []
        for block_item in sorted(reply.new_block_item_idx.tolist()):
            require(0 <= block_item < len(batch.reserve_ids), "new blocks for no reservation")
        require(reply.new_block_item_idx.tolist() == sorted(reply.new_block_item_idx.tolist()), "new blocks out of order")
        copies = iter(self.split_copies(reply.copy_sources.tolist(), reply.copy_destinations.tolist()))
        self.filling.update(dict.fromkeys(self.cleared, (session, batch.step_id)))
        columns = (batch.reserve_ids, batch.reserve_min, batch.reserve_max, reply.reserve_reserved)
        blocked = False
        for item, (sequence_id, least, most, answer) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            if sequence_id in refused:
                expect(answer, 0, f"reservation of {sequence_id} after its refused fork")
                continue
            q = self.sequences[session, sequence_id]
            of_item = reply.new_block_item_idx == item
            new_blocks = reply.new_block_ids[of_item].tolist()
            blocked, update = self.reserve(q, least, most, answer, new_blocks, copies, blocked=blocked)
            updates += update
        for q, num_blocks in self.refused:
            self.claim(q, num_blocks)
        self.refused = []
        require(next(copies, None) is None, "more copies than copies-on-write")
        self.check_cleared()
        self.evict("reservations")
        return updates

    def reserve(
        self,
        q: NaiveSequence,
        least: int,
        most: int,
        answer: int,
        new_blocks: list[int],
        copies: Iterator[tuple[int, int]],
        *,
        blocked: bool,
    ) -> tuple[bool, list[Update]]:
        """The largest count that fits. Returns whether later items get nothing, and the table updates."""
        target = max(q.reserved, most)
        copied_idx = self.must_copy(q, target)
        needed = max(0, self.num_blocks(least) - len(q.table)) + (copied_idx is not None)
        has_right = bool(self.claimants()) and not self.is_later(q)
        if has_right or not (blocked or self.is_later(q)):
            self.give_way(q, needed - self.num_available(), [])
        available = self.num_available()
        room = 0 if blocked and not has_right else max(0, available - self.kept_from(q))
        room -= copied_idx is not None
        granted = min(target, (len(q.table) + max(room, 0)) * self.block_size)
        name = f"reservation of {q.sequence_id}"
        if granted < least or room < 0:
            require(answer < least, f"{name}: refused, but the answer {answer} reads as granted")
            expect(answer, min(q.reserved, least - 1), f"{name}, refused")
            expect(new_blocks, [], f"R7 {name}, refused")
            self.refused.append((q, self.num_blocks(target) - len(q.table) + (copied_idx is not None)))
            self.num_kept += needed <= available and not blocked
            return blocked or needed > available, []
        q.claim = None
        expect(answer, granted, name)
        expect(len(new_blocks), self.num_blocks(granted) - len(q.table), f"R2 new blocks of {name}")
        updates: list[Update] = []
        copied: list[int] = []
        if copied_idx is not None:
            copy = next(copies, None)
            require(copy is not None, f"R5 {name}: no copy of the block it shares")
            assert copy is not None
            expect(copy[0], q.table[copied_idx], f"R5 {name}: source of the copy")
            copied = [copy[1]]
            updates.append((q.sequence_id, copied_idx, copy[1]))
        if copied_idx is not None:
            self.grant(copied, q.scope, f"copy for the {name}")
            self.foreign = [block for block in self.foreign if block not in copied]
            self.let_go(q.session, q.table[copied_idx], still_used=True)
            q.table[copied_idx] = copied[0]
            self.filling[copied[0]] = q.session, self.sessions[q.session].step_id
            self.num_copies += 1
            self.settle()
        self.grant(new_blocks, q.scope, name)
        self.num_changes += granted > q.reserved or copied_idx is not None
        q.table += new_blocks
        q.reserved = granted
        q.granted_at[self.sessions[q.session].step_id] = granted
        return blocked, updates


def commits_of(batch: StepBatch) -> list[tuple[int, int, list[int]]]:
    """(sequence id, length, new tokens) of each commit."""
    items, at = [], 0
    columns = (batch.commit_ids, batch.commit_lens, batch.commit_num_new)
    for sequence_id, length, num_new in zip(*(column.tolist() for column in columns), strict=True):
        items.append((sequence_id, length, batch.commit_tokens[at : at + num_new].tolist()))
        at += num_new
    return items
