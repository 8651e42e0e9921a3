"""What engines make of the answers of a pool with a host tier, and what must hold of every answer.

A hit and a swap-in hold their tokens right now; a table is what was told; a refusal left the sequence where it was.
"""

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.core.values.types import (
    NO_INT32,
    Executor,
    Int32Array,
    ItemResult,
    SequenceId,
    SequenceState,
    StartResult,
)
from tests.support.reference.read_spans import first_read
from tests.support.reference.shadow_memory import Contents
from tests.support.reference.tier_memory import PASSED, TierMemory, TierOrder, TierStep
from tests.support.tiers.tier_engine import TierCounts, TierEngine, TierItems, TierSequence
from tests.support.worlds.engine_model import Choose, unread
from tests.support.worlds.event_reader import SPEC_KEY
from tests.support.worlds.scopes import NAMES


class TierAnswers:
    """A manager, the content oracle of both tiers, and the checks of every answer.

    faults: one order in so many fails, and one in four times as many is never reported.
    """

    def __init__(self, config: PoolConfig, alphabet: int, faults: int) -> None:
        self.config, self.alphabet, self.faults = config, alphabet, faults
        self.manager = PoolManager(config, spec_key=SPEC_KEY)
        self.memory = TierMemory(config.num_blocks, config.num_host_blocks, config.block_size)
        self.contents = Contents()
        self.counts = TierCounts()
        self.written: dict[str, set[int]] = {}  # contents of each tenant
        self.spans, self.has_tail = config.group_spans, config.has_tail
        self.states = [group for group, span in enumerate(self.spans) if span.checkpoint_blocks]

    def apply(
        self,
        engine: TierEngine,
        items: TierItems,
        before: dict[int, SequenceState],
        reply: StepReply,
        choose: Choose,
    ) -> None:
        step = TierStep(engine.step_id)
        runs_now = engine.executor is Executor.CACHE
        for order_id, kind, source, destination in zip(
            reply.transfer_ids.tolist(),
            reply.transfer_kinds.tolist(),
            reply.transfer_sources.tolist(),
            reply.transfer_destinations.tolist(),
            strict=True,
        ):
            order = TierOrder(order_id, kind, source, destination)
            if runs_now:
                self.memory.move(order)
            else:
                order.fails = choose(self.faults) == 1
                order.silent = choose(4 * self.faults) == 1
                self.counts.silent += order.silent
                step.orders.append(order)
                engine.orders.append(order)
        copies = list(zip(reply.copy_sources.tolist(), reply.copy_destinations.tolist(), strict=True))
        if runs_now:
            self.memory.run(TierStep(engine.step_id, copies=copies))
        else:
            step.copies = copies
        for row, ((parent_id, child_id, num_tokens), result) in enumerate(
            zip(items.forks, reply.fork_results.tolist(), strict=True)
        ):
            self.counts.forks += result == ItemResult.OK
            self.counts.refused_forks += result == ItemResult.NO_ROOM
            if result == ItemResult.OK:
                parent = engine.sequences[parent_id]
                tokens = parent.tokens[:num_tokens]
                child = TierSequence(child_id, parent.scope, tokens, parent.max_tokens, SequenceState.RUNNING, num_tokens)
                kept = int(reply.fork_committed[row]) if self.states else num_tokens
                self.counts.short_cuts += kept < num_tokens
                child.committed = child.reserved = child.computed = kept
                child.retention, child.passed_len = parent.retention, parent.passed_len
                child.passed_len = min(child.passed_len, kept) if self.states else child.passed_len
                engine.sequences[child_id] = child
        for row, (sequence_id, num_tokens) in enumerate(items.truncates):
            q = engine.sequences.get(sequence_id)
            if q is None:  # here and below: the child of a refused fork
                self.counts.refused_children += 1
                continue
            del q.tokens[max(num_tokens, 0) :]
            q.num_known = min(q.num_known, num_tokens)
            if self.states:
                if num_tokens >= q.reserved:
                    assert int(reply.truncate_committed[row]) == q.committed, "nothing of it is cut"
                    continue
                self.counts.short_cuts += int(reply.truncate_committed[row]) < num_tokens
                num_tokens = int(reply.truncate_committed[row])
                q.passed_len = min(q.passed_len, num_tokens)
            q.committed, q.computed = min(q.committed, num_tokens), min(q.computed, num_tokens)
            q.reserved = min(q.reserved, num_tokens)
            q.written = [(at, min(length, num_tokens)) for at, length in q.written]
        for sequence_id in items.releases:
            self.counts.refused_children += engine.sequences.pop(sequence_id, None) is None
        self._apply_swaps(engine, items, before, reply)
        self._apply_starts(engine, items, reply)
        late_starts = self._apply_ready(engine, before, reply)
        for (sequence_id, least, most), granted in zip(items.reserves, reply.reserve_reserved.tolist(), strict=True):
            q = engine.sequences.get(sequence_id)
            if q is None:
                assert granted == 0
                self.counts.refused_children += 1
            elif granted >= least:
                assert granted <= max(most, q.reserved)
                q.reserved = granted
        for q in engine.sequences.values():
            view = self.manager.queries.view(engine.session, SequenceId(q.id))
            assert view.state == q.state, (q, view)
            others = view.group_tables or (NO_INT32,) * (len(self.spans) - 1)  # none are shown of a sequence without blocks
            q.tables = [view.block_table.tolist(), *(table.tolist() for table in others)]
            if q.state is SequenceState.RUNNING:
                assert view.num_reserved_tokens == q.reserved, (q, view)
        writing = [item[0] for item in items.reserves] + [item[0] for item in items.starts] + reply.ready_ids.tolist()
        for sequence_id in dict.fromkeys(writing):
            q = engine.sequences.get(sequence_id)
            if q is not None and q.state is SequenceState.RUNNING and self._may_write(q, items, reply, late_starts):
                self._write(engine, q, step, choose)
        if runs_now:
            self.memory.run(step)
        else:
            self.memory.issue(engine.session, step)

    def _may_write(self, q: TierSequence, items: TierItems, reply: StepReply, late_starts: set[int]) -> bool:
        """A step writes only what it reserves or starts: of a sequence that is ready, the reservation comes first."""
        for row, (sequence_id, least, _) in enumerate(items.reserves):
            if sequence_id == q.id:
                return int(reply.reserve_reserved[row]) >= least
        return q.id not in reply.ready_ids.tolist() or q.id in late_starts

    def _write(self, engine: TierEngine, q: TierSequence, step: TierStep, choose: Choose) -> None:
        """Reads the context of a sequence and writes up to all of its slots; beyond its tokens it makes some up."""
        size, upto = self.config.block_size, q.reserved - choose(2)
        if upto <= q.computed or self.states:  # states are there at the granted length alone
            upto = q.reserved
        while len(q.tokens) < upto:
            q.tokens.append(choose(self.alphabet))
        own = self.written.setdefault(NAMES[q.scope][0], set())
        for group, table in enumerate(q.tables):
            label = f"{engine.session[-2:]}/{q.id} group {group} step {step.step_id}"
            spelled = self.spell(q, group, upto)
            if group in self.states:
                if q.computed:
                    step.reads.append((label, *self._state(table, spelled, q.computed)))
                own.update(spelled)
                step.own.append((label, [block for block in table if block], own))
                for entry in range(q.computed // size, -(-upto // size) if upto > q.computed else 0):
                    content = spelled[min((entry + 1) * size, upto) - 1]
                    step.writes += [(table[entry], offset, content) for offset in range(size)] if table[entry] else []
                continue
            step.reads.append((label, list(table), self.read(q, group, table, spelled[: q.computed])))
            own.update(spelled)
            step.own.append((label, list(table), own))
            for position in range(q.computed, upto):
                if self._is_lacking(group, table, position):
                    self.counts.tail_unwritten += 1
                    continue
                step.writes.append((table[position // size], position % size, spelled[position]))
        if upto > q.computed:
            q.computed = upto
            q.written.append((step.step_id, upto))

    def _apply_swaps(self, engine: TierEngine, items: TierItems, before: dict[int, SequenceState], reply: StepReply) -> None:
        ready = set(reply.ready_ids.tolist())
        self.counts.both_swaps += len({*items.outs} & {*items.ins})
        for sequence_id, result in zip(items.outs, reply.swap_out_results.tolist(), strict=True):
            q = engine.sequences.get(sequence_id)
            if q is None:
                assert result == ItemResult.NO_ROOM
                self.counts.refused_children += 1
            elif result == ItemResult.OK:
                q.state = SequenceState.SWAPPED
                self.counts.swap_outs += before.get(sequence_id) is not SequenceState.SWAPPED
                self.counts.moved_children += sequence_id not in before
            else:
                self.counts.refused_outs += 1
                q.state = SequenceState.RUNNING  # where it was swapped, that had failed
        for sequence_id, result in zip(items.ins, reply.swap_in_results.tolist(), strict=True):
            q = engine.sequences.get(sequence_id)
            if q is None:
                assert result == ItemResult.NO_ROOM
                self.counts.refused_children += 1
            elif result == ItemResult.NO_ROOM:
                self.counts.refused_ins += 1
                q.state = SequenceState.SWAPPED
            elif sequence_id not in ready and q.state is not SequenceState.RUNNING:
                q.state = SequenceState.LOADING
        for q in engine.sequences.values():
            # The load of a swap-in failed, and an engine learns it only by asking again.
            if before.get(q.id) is SequenceState.LOADING and not q.is_start and q.id not in ready and q.id not in items.ins:
                q.state = self.manager.queries.view(engine.session, SequenceId(q.id)).state
                assert q.state in (SequenceState.LOADING, SequenceState.SWAPPED)
                self.counts.back_in_host += q.state is SequenceState.SWAPPED

    def _apply_starts(self, engine: TierEngine, items: TierItems, reply: StepReply) -> None:
        first = 0
        for row, (sequence_id, _, _) in enumerate(items.starts):
            q, result, hit = engine.sequences[sequence_id], int(reply.start_results[row]), int(reply.start_hits[row])
            tables = self._tables(reply.start_block_ids, first, int(reply.start_num_blocks[row]))
            first += int(reply.start_num_blocks[row]) * len(self.spans)
            if result == StartResult.STARTED:
                q.state, q.reserved = SequenceState.RUNNING, int(reply.start_reserved[row])
                self._check_hit(q, tables, hit)
            elif result == StartResult.LOADING:
                q.state, q.is_start = SequenceState.LOADING, True
                q.committed = hit  # for now: what it may become
                self.counts.loading += 1

    def _apply_ready(self, engine: TierEngine, before: dict[int, SequenceState], reply: StepReply) -> set[int]:
        """Returns the starts among those that are ready."""
        late_starts: set[int] = set()
        first = 0
        for row, sequence_id in enumerate(reply.ready_ids.tolist()):
            q, state = engine.sequences[sequence_id], before.get(sequence_id, SequenceState.SWAPPED)
            tables = self._tables(reply.ready_block_ids, first, int(reply.ready_num_blocks[row]))
            first += int(reply.ready_num_blocks[row]) * len(self.spans)
            hit, reserved = int(reply.ready_hits[row]), int(reply.ready_reserved[row])
            self.counts.ready += 1
            q.state = SequenceState.RUNNING
            if q.is_start:
                self.counts.short_hits += hit < q.committed
                q.reserved, q.committed, q.is_start = reserved, 0, False
                late_starts.add(q.id)
                self._check_hit(q, tables, hit)
            else:
                self.counts.swap_ins += state is SequenceState.LOADING
                self.counts.grouped_swaps += state is SequenceState.LOADING and len(tables) > 1
                self.counts.tail_swaps += self.has_tail and state is SequenceState.LOADING and any(tables[1])
                self.counts.back_on_device += state is SequenceState.SWAPPED
                assert reserved == q.reserved, (q, reserved)
                if state is SequenceState.LOADING:
                    self._check_tables("swap-in", q, tables, q.committed)
        return late_starts

    def _tables(self, blocks: Int32Array, first: int, num_entries: int) -> list[list[int]]:
        """Tables of so many entries, that of each group of layers behind the one before."""
        starts = [first + group * num_entries for group in range(len(self.spans))]
        return [blocks[start : start + num_entries].tolist() for start in starts]

    def spell(self, q: TierSequence, group: int, length: int) -> list[int]:
        """What the slots of one group hold; each group has contents of its own."""
        return self.contents.spell(f"{q.scope}/{group}", q.tokens[:length])

    def read(self, q: TierSequence, group: int, table: list[int], contents: list[int]) -> list[int]:
        """The contents that attention reads, PASSED for those between sink and window, and before a group's window.

        Of a tail also those that it lacks, which are before all that it has.
        """
        passed, start = unread(q.retention, len(contents)), first_read(self.spans[group], len(contents))
        while start < len(contents) and self._is_lacking(group, table, start):
            self.counts.tail_gaps += 1
            start += 1
        return [PASSED if position in passed or position < start else content for position, content in enumerate(contents)]

    def _is_lacking(self, group: int, table: list[int], position: int) -> bool:
        return self.has_tail and group > 0 and table[position // self.config.block_size] == 0

    def _check_tables(self, what: str, q: TierSequence, tables: list[list[int]], length: int) -> None:
        """Blocks hold what the token at this length reads right now, before anything in flight has run (R4, R6)."""
        for group, table in enumerate(tables):
            label = f"{what} of {q.id}, group {group}"
            if group in self.states:
                self._check_states(label, table, self.spell(q, group, length))
                continue
            fault = self.memory.fault(label, table, self.read(q, group, table, self.spell(q, group, length)))
            assert not fault, fault

    def _state(self, table: list[int], contents: list[int], length: int) -> tuple[list[int], list[int]]:
        """The block of the state behind so many tokens, and what all of it holds."""
        return [table[(length - 1) // self.config.block_size]], contents[length - 1 : length] * self.config.block_size

    def _check_states(self, label: str, table: list[int], contents: list[int]) -> None:
        """Every state of these tokens that the table has, and at least the one behind the last of them."""
        size, length = self.config.block_size, len(contents)
        assert not length or table[(length - 1) // size], label
        for entry in range(-(-length // size)):
            if table[entry]:
                fault = self.memory.fault(label, *self._state(table, contents, min((entry + 1) * size, length)))
                assert not fault, fault
        self.counts.state_tables += length > 0

    def _check_hit(self, q: TierSequence, tables: list[list[int]], hit: int) -> None:
        assert hit % self.config.block_size == 0
        assert hit < len(q.tokens)
        self.counts.grouped_hits += hit > 0 and len(tables) > 1
        self._check_tables("hit", q, tables, hit)
        q.committed = q.computed = q.passed_len = hit
