"""A pool of several groups of layers, driven by random valid steps, with the bytes of every block watched.

Owns two sessions whose device work runs late, what each computes, hands to the other and pins, and the comparison of three
views after every step: the tables that the pool has, those that a client keeps of what it was told, and the contents of the
blocks behind them. The contents of each group are its own, so a block of another group never spells a sequence. What a token
reads is worked out here anew, from the spans alone. Of a group of states the contents are the state behind a token, and every
block that its tables have is looked at after every step.
"""

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.errors import InvalidField, NeverFits, OutOfSequences, StepNotCompleted, UnknownPin
from kvkeeper.cache_service.core.values.kv_spec import ReadSpan
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.core.values.types import Executor, ItemResult, SequenceId, SequenceState, SessionId, StartResult
from tests.support.reference.read_spans import first_read
from tests.support.reference.shadow_memory import Contents, DeviceStep, Read, ShadowMemory, StateRead
from tests.support.reference.told_tables import ToldTables
from tests.support.worlds.core_pool import step_batch
from tests.support.worlds.scopes import SCOPES

_SCOPES = SCOPES[:2]  # so few that prompts find something


@dataclass(slots=True)
class Sequence:
    """What its engine knows of a sequence."""

    scope: str
    tokens: list[int]
    is_running: bool = False
    committed: int = 0
    reserved: int = 0
    computed: int = 0  # tokens whose K and V steps have written, or are about to
    busy_until: int = 0  # the step that computes the last of them


@dataclass(slots=True)
class Engine:
    """One session of the world."""

    session: SessionId
    told: ToldTables
    sequences: dict[int, Sequence] = field(default_factory=dict)
    step_id: int = 0


class GroupedWorld:
    """Random steps of two engines on one pool.

    spans: of each group. has_tail: those behind the first are finer copies, which a sequence may lack parts of.
    takes_partial: the sessions leave partly filled blocks and start on them, and prompts go on where sequences ended.
    """

    def __init__(
        self,
        seed: int,
        spans: tuple[ReadSpan, ...],
        num_blocks: int,
        block_size: int,
        policy: str = "adaptive",
        *,
        has_tail: bool = False,
        takes_partial: bool = False,
        **config_fields: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.spans, self.size, self.has_tail = spans, block_size, has_tail
        self.states = [group for group, span in enumerate(spans) if span.checkpoint_blocks]
        self.num_shortened = self.num_kept_cuts = self.num_late_cuts = (
            0  # cuts that left less, all, or were of a step in flight
        )
        config = PoolConfig(
            num_blocks,
            block_size,
            max_sequences=12,
            max_tokens_per_sequence=96,
            group_spans=spans,
            eviction_policy=policy,
            has_tail=has_tail,
            **config_fields,
        )
        self._takes_partial = takes_partial
        self._ended: list[tuple[str, list[int]]] = []  # sequences that were released, with what was committed of them
        self.num_partial_hits = 0
        self.manager, self.contents = PoolManager(config), Contents()
        self.memory = ShadowMemory(num_blocks, block_size)
        self.engines = [self._open(name) for name in ("a", "b")]
        self.prompts = [[self.random.randrange(3) for _ in range(60)] for _ in range(3)]
        self.num_hits = self.num_refused = self.num_cut = self.num_forks = self.num_copies = self.num_holes = self._last_id = 0
        self.num_handed = self.num_pinned = self.num_items = self.num_ended = 0
        self._extra = random.Random(seed + 1000)  # for hand-overs and pins
        self._pins: list[tuple[SessionId, str]] = []
        self.num_lacking = self.num_unwritten = 0  # tables of a tail without part of its window; tokens without a place in one

    def _open(self, name: str) -> Engine:
        self.manager.sessions.open(SessionId(name), Executor.ENGINE, takes_partial=self._takes_partial)
        return Engine(SessionId(name), ToldTables(self.size, len(self.spans)))

    # One step

    def run_step(self) -> None:
        """A step of one of the engines, or the end of its session."""
        engine = self.random.choice(self.engines)
        if self.random.random() < 0.01:
            self._reopen(engine)
            return
        if not self.has_tail and not self.states and self._extra.random() < 0.03:
            self._hand_over(engine, next(other for other in self.engines if other is not engine))
        if not self.has_tail and self._extra.random() < 0.03:
            self._pin(engine)
        if len(engine.sequences) < 5 and self.random.random() < 0.4:
            self._create(engine)
        completed = engine.step_id - self.random.choice((0, 0, 1))
        completed = max(completed, 0)
        faults = self.memory.run_through(engine.session, completed)
        assert not faults, faults
        items = self._items(engine, completed)
        batch = step_batch(engine.step_id + 1, completed, **items)
        before = self.manager.queries.check_invariants()
        assert not before, before
        try:
            reply = self.manager.steps.step(engine.session, batch)
        except InvalidField as error:
            cuts = () if self.states else ("truncate_num_tokens", "fork_num_tokens")
            if error.metadata["field"] not in (*cuts, "reserve_min_tokens"):
                raise
            self.num_refused += 1
            return
        engine.step_id += 1
        self.num_items += sum(map(len, items.values()))
        self._apply(engine, items, batch, reply)
        if self.random.random() < 0.5:
            self.manager.maintenance.publish_pending(self.random.choice((1, 3, 1000)))
        self._check(engine)

    def _hand_over(self, giver: Engine, taker: Engine) -> None:
        """A running sequence changes its session, where no step works on it and no update of its tables is untold."""
        running = [i for i, each in giver.sequences.items() if each.is_running]
        if not running or self.manager.state.session(giver.session).updates:
            return
        sequence_id, self._last_id = self._extra.choice(running), self._last_id + 1
        try:
            offer = self.manager.hand_offs.offer(giver.session, SequenceId(sequence_id), self._last_id.to_bytes(16, "little"))
        except StepNotCompleted:
            return
        self.manager.maintenance.publish_pending()
        if self.manager.state.session(giver.session).updates:
            return
        self.manager.hand_offs.take(taker.session, offer, SequenceId(self._last_id))
        taker.sequences[self._last_id] = each = giver.sequences.pop(sequence_id)
        each.computed, each.busy_until = each.committed, 0
        taker.told.tables[self._last_id] = giver.told.tables.pop(sequence_id)
        taker.told.groups[self._last_id] = giver.told.groups.pop(sequence_id)
        self.num_handed += 1

    def _pin(self, engine: Engine) -> None:
        """A prefix is kept for a while, or a pin ends."""
        if self._pins:
            session, pin_id = self._pins.pop()
            if session in self.manager.state.sessions:
                with contextlib.suppress(UnknownPin):  # it gave way
                    self.manager.prefixes.unpin(session, pin_id)
            return
        self._last_id += 1
        tokens = np.array(self._extra.choice(self.prompts)[: self._extra.randrange(1, 60)], np.int32)
        pinned = self.manager.prefixes.pin(engine.session, f"pin {self._last_id}", self._extra.choice(_SCOPES), tokens, 60.0)
        self.num_pinned += pinned.num_tokens > 0
        self._pins += [(engine.session, pinned.pin_id)] if pinned.pin_id else []

    def _create(self, engine: Engine) -> None:
        self._last_id += 1
        tokens = self.random.choice(self.prompts)[: self.random.randrange(1, 60)]
        tokens = [*tokens, *(self.random.randrange(3) for _ in range(self.random.choice((0, 0, 5))))]
        scope = self.random.choice(_SCOPES)
        if self._takes_partial and self._ended and self._extra.random() < 0.5:
            scope, tokens = self._extra.choice(self._ended[-6:])
            tokens = [*tokens, *(self._extra.randrange(3) for _ in range(self._extra.choice((0, 1, 5))))][:80]
        args = SequenceArgs(SequenceId(self._last_id), np.array(tokens, np.int32), scope=scope)
        try:
            self.manager.creation.create(engine.session, args)
        except (NeverFits, OutOfSequences):
            return
        engine.sequences[self._last_id] = Sequence(scope, tokens)

    def _items(self, engine: Engine, completed: int) -> dict[str, list[tuple[object, ...]]]:
        draw, running = self.random.random, {i: each for i, each in engine.sequences.items() if each.is_running}
        commits, truncates, forks, releases, starts, reserves = [], [], [], [], [], []
        lens, depth = {}, 30 if self.has_tail else 9
        for i, each in running.items():
            lens[i] = each.committed
            if each.computed > each.committed and each.busy_until <= completed:
                new = [self.random.randrange(3)] if each.computed == len(each.tokens) < 90 else []
                commits.append((i, each.computed, new))
                lens[i] = each.computed
            elif self.has_tail and each.computed == each.committed == len(each.tokens) < 90 and each.busy_until <= completed:
                commits.append((i, each.committed, [self.random.randrange(3)]))  # goes on behind where it was cut
        for i, each in running.items():
            is_idle, kind = each.busy_until <= completed, draw()
            is_whole = self._takes_partial and lens[i] == each.reserved and self._extra.random() < 0.2
            if kind < 0.05 or is_whole:
                releases.append(i)
            elif kind < 0.1 and self.states and each.tokens:
                truncates.append((i, self.random.randrange(1, len(each.tokens) + 2)))
                self.num_late_cuts += not is_idle
            elif kind < 0.1 and is_idle and lens[i] > 1:
                truncates.append((i, self.random.randrange(max(1, lens[i] - depth), lens[i] + 1)))
            elif kind < 0.16 and lens[i] > 1:
                self._last_id += 1
                forks.append(
                    (i, self._last_id, lens[i] - self.random.choice((0, 0, 0, min(lens[i] - 1, self.random.randrange(depth)))))
                )
            elif is_idle and kind < 0.95:
                known = len(each.tokens) + sum(len(new) for item, _, new in commits if item == i)
                most = min(known, lens[i] + self.random.choice((1, 1, 4, 20)))
                if most > lens[i]:
                    reserves.append((i, self.random.choice((lens[i] + 1, most)), most))
        for i, each in engine.sequences.items():
            if not each.is_running and draw() < 0.5:
                starts.append((i, self.random.choice((4, 30)), self.random.choice((0, 1000, 1000))))
        named = {"commits": commits, "truncates": truncates, "forks": forks, "releases": releases, "starts": starts}
        return {**named, "reserves": reserves}  # type: ignore[return-value]

    def _apply(self, engine: Engine, items: dict, batch: object, reply: StepReply) -> None:  # type: ignore[type-arg]
        """What the engine makes of the answer: tables, and the device work of the step."""
        engine.told.apply(batch, reply)  # type: ignore[arg-type]
        sequences, work = engine.sequences, DeviceStep(engine.step_id, is_known=True)
        self.memory.issue(str(engine.session), work)
        work.copies = list(zip(reply.copy_sources.tolist(), reply.copy_destinations.tolist(), strict=True))
        self.num_copies += len(work.copies)
        for i, length, new in items["commits"]:
            sequences[i].committed = length
            sequences[i].tokens += new
        for row, ((parent, child, length), result) in enumerate(zip(items["forks"], reply.fork_results.tolist(), strict=True)):
            if result == ItemResult.OK:
                self.num_forks += 1
                each, kept = sequences[parent], self._kept(length, reply.fork_committed, row)
                if length == each.committed == each.reserved:
                    assert kept == length, "the states behind all that is committed are there"
                sequences[child] = Sequence(each.scope, each.tokens[:length], True, kept, kept, kept, 0)
        for row, (i, length) in enumerate(items["truncates"]):
            each, kept = sequences[i], self._kept(length, reply.truncate_committed, row)
            self.num_cut += 1
            each.tokens = each.tokens[:length]
            if self.states and length >= each.reserved:
                assert kept == each.committed, "nothing of it is cut"
                continue
            each.committed, each.reserved = min(each.committed, kept), min(each.reserved, kept)
            each.computed = each.committed
            each.busy_until *= not self.states  # what a step in flight computes is not wanted any more
        for i in items["releases"]:
            each = sequences.pop(i)
            self._ended.append((each.scope, each.tokens[: each.committed])) if each.committed else None
        columns = (reply.start_results, reply.start_hits, reply.start_reserved)
        for (i, _, _), result, hit, reserved in zip(items["starts"], *(each.tolist() for each in columns), strict=True):
            if result == StartResult.STARTED:
                each = sequences[i]
                each.is_running, each.committed, each.computed, each.reserved = True, hit, hit, reserved
                self.num_hits += hit > 0
                self.num_partial_hits += hit % self.size > 0
                self._compute(engine, work, i, reserved)
        for (i, least, _), granted in zip(items["reserves"], reply.reserve_reserved.tolist(), strict=True):
            each = sequences[i]
            if granted >= least:
                each.reserved = max(each.reserved, granted)
                self._compute(engine, work, i, min(granted, len(each.tokens)))

    def _kept(self, length: int, told: np.ndarray, row: int) -> int:
        """What a cut to this length leaves committed, as the answer tells."""
        assert bool(len(told)) == bool(self.states)
        if not self.states:
            return length
        kept = int(told[row])
        assert kept <= length
        self.num_shortened += kept < length
        self.num_kept_cuts += kept == length
        return kept

    def _compute(self, engine: Engine, work: DeviceStep, sequence_id: int, end: int) -> None:
        """The step computes a sequence from its committed tokens up to `end`."""
        each, start = engine.sequences[sequence_id], engine.sequences[sequence_id].committed
        for group, table in enumerate(self._tables(engine, sequence_id)):
            contents = self.contents.spell(f"{each.scope}/{group}", each.tokens[:end])
            if group in self.states:
                if start:
                    place = table[(start - 1) // self.size]
                    work.reads.append(StateRead(f"{sequence_id} group {group}", place, contents[start - 1]))
                for entry in range(start // self.size, -(-end // self.size)):
                    if table[entry]:
                        work.writes.append((table[entry] * self.size, contents[min((entry + 1) * self.size, end) - 1]))
                assert table[(end - 1) // self.size] or end == start, "the state behind the last token has no place"
                continue
            unread = self._unread(group, start, table)
            work.reads.append(Read(f"{sequence_id} group {group}", list(table), contents[:start], unread))
            places = [at for at in range(start, end) if not self._is_lacking(group, table, at)]
            self.num_unwritten += end - start - len(places)
            work.writes += [(self.memory.slot(table, at), contents[at]) for at in places]
        each.computed, each.busy_until = end, engine.step_id

    def _unread(self, group: int, length: int, table: list[int]) -> range:
        """Positions that no token from `length` on reads in a group.

        Of a tail also those that it lacks, which are before all that it has.
        """
        end = first_read(self.spans[group], length)
        while end < length and self._is_lacking(group, table, end):
            end += 1
        return range(end)

    def _is_lacking(self, group: int, table: list[int], position: int) -> bool:
        return self.has_tail and group > 0 and table[position // self.size] == 0

    def _tables(self, engine: Engine, sequence_id: int) -> list[list[int]]:
        return [engine.told.tables[sequence_id], *engine.told.groups[sequence_id]]

    def _reopen(self, engine: Engine) -> None:
        """The session ends without its engine; what it may still write is withheld until it has."""
        self.manager.sessions.close(engine.session, may_still_write=True)
        while self.memory.num_in_flight(str(engine.session)):
            self.memory.run_one(str(engine.session), ended=True)
        self.manager.sessions.end_quarantine(engine.session)
        self.num_ended += 1
        self._last_id += 1
        self.engines[self.engines.index(engine)] = self._open(f"{engine.session}{self._last_id}")

    # Checks

    def _check(self, engine: Engine) -> None:
        wrong = self.manager.queries.check_invariants()
        assert not wrong, wrong
        reads = []
        for i, each in engine.sequences.items():
            view = self.manager.queries.view(engine.session, i)
            assert (view.state == SequenceState.RUNNING) == each.is_running
            if not each.is_running:
                continue
            told = self._tables(engine, i)
            has = [view.block_table.tolist(), *(table.tolist() for table in view.group_tables)]
            if not self.manager.state.session(engine.session).updates:  # else the next reply tells the rest
                assert has == told or not any([*has, *told]), (i, has, told)  # without blocks one table is shown
            self.num_holes += sum(table.count(0) for table in has)
            for group, table in enumerate(told):
                if group in self.states:
                    reads += self._state_reads(i, each, group, table)
                    continue
                contents = self.contents.spell(f"{each.scope}/{group}", each.tokens[: each.committed])
                unread = self._unread(group, each.committed, table)
                self.num_lacking += self.has_tail and group > 0 and len(unread) > first_read(self.spans[group], each.committed)
                reads.append(Read(f"{i} group {group}", table, contents, unread))
        faults = self.memory.check(str(engine.session), reads)
        assert not faults, faults

    def _state_reads(self, sequence_id: int, each: Sequence, group: int, table: list[int]) -> list[StateRead]:
        """All states that the table has of what is computed; of a block that is being computed that behind the last token."""
        contents = self.contents.spell(f"{each.scope}/{group}", each.tokens[: each.computed])
        ends = [(entry, min((entry + 1) * self.size, each.computed)) for entry in range(-(-each.computed // self.size))]
        return [StateRead(f"{sequence_id} group {group}", table[at], contents[end - 1]) for at, end in ends if table[at]]
