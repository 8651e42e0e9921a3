"""A scheduler driven against a cache and a shadow memory, step by step, without a loop or a model.

The oracle is content: every slot holds the prefix that wrote it, and before a row computes, its table is read back and
must spell its tokens. The next token is a function of (tokens, continuation), so outputs are known beforehand.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvkeeper.cache_service.core.values.kv_spec import ReadSpan as CoreSpan
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import NO_INT32, NO_INT64
from kvkeeper.engine_service.scheduler.headroom import Preemption
from kvkeeper.engine_service.scheduler.limits import WHOLE, Limits, ReadSpan
from kvkeeper.engine_service.scheduler.plan import Plan, Work
from kvkeeper.engine_service.scheduler.scheduler import Scheduler
from kvkeeper.engine_service.scheduler.waiting import WaitingSequences
from kvkeeper.engine_service.values.request import Request, Retention, Sequence, SequenceState
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.tiny_columns import OutOfSequences, TinyColumns

NUM_TOKENS = 3
STEP_S = 0.01
_SWAP_OUT = 1  # TransferKind of the protocol
MAX_RETAINED_LEN = 1000
_ELSEWHERE = 1 << 40  # ids of sequences that are not the scheduler's


def next_token(tokens: tuple[int, ...], index: int) -> int:
    return (sum((place + 2) * token for place, token in enumerate(tokens[-5:])) + len(tokens) * (index + 1)) % NUM_TOKENS


def expected_output(request: Request, index: int) -> list[int]:
    tokens = request.prompt.tolist()
    for _ in range(request.max_new_tokens):
        tokens.append(next_token(tuple(tokens), index))
    return tokens[len(request.prompt) :]


def make_request(
    prompt: list[int],
    max_new_tokens: int,
    n: int = 1,
    priority: int = 0,
    look_up: bool = True,
    retention: Retention | None = None,
    client: str = "",
) -> Request:
    tokens = np.array(prompt, np.int32)
    return Request("r", tokens, max_new_tokens, n=n, priority=priority, look_up=look_up, retention=retention, client=client)


def content(tokens: tuple[int, ...], retention: Retention | None) -> tuple[object, ...]:
    """What K and V of the last token are a function of: all before it, and what its queries were let see of that."""
    return tokens if retention is None or len(tokens) <= retention.num_tokens else (*tokens, retention)


def make_plan(**columns: Any) -> Plan:
    """A step of these columns alone."""
    required = [name for name in Plan._fields if name not in Plan._field_defaults]
    empty: dict[str, Any] = {name: NO_INT64 if name.endswith(("ids", "rows")) else NO_INT32 for name in required}
    return Plan(**empty | {"guesses": {}} | columns)


Slots = dict[int, tuple[int, ...]]


def _copy_block(source_slots: Slots, slots: Slots, source: int, destination: int, size: int) -> None:
    for offset in range(size):
        slots[destination * size + offset] = source_slots.get(source * size + offset, ())


@dataclass
class Flight:
    """A step on its way through the device, with what was known when it was launched."""

    work: Work
    answer: Any
    histories: list[tuple[int, ...]]
    num_committed: list[int]


class World:
    default_cache: ClassVar[type[TinyColumns] | type[CoreCache]] = TinyColumns

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 2,
        max_sequences: int = 64,
        token_budget: int = 64,
        chunk_size: int = 8,
        max_running: int = 32,
        make_cache: Callable[..., TinyColumns | CoreCache] | None = None,
        guess: Callable[[tuple[int, ...], int], list[int]] = lambda tokens, index: [],
        overlap: bool = False,
        ahead: bool = False,
        num_host_blocks: int = 0,
        preemption: Preemption = Preemption.SWAP,
        waiting: WaitingSequences | None = None,
        prefill_budget: int = 64,
        decode_budget: int = 32,
        client_shares: bool = False,
        group_spans: tuple[ReadSpan, ...] = (WHOLE,),
        max_step_items: int = 256,
    ) -> None:
        """guess: of what follows a sequence's tokens, given its continuation. overlap: a step's device work runs late, after
        the next one was asked for; needs CoreCache, as does a host tier. ahead: also after the next one was launched, where the
        scheduler lets it."""
        self.guess = guess
        self._overlap, self._ahead = overlap or ahead, ahead
        self._in_flight: Flight | None = None
        self.last_drawn: dict[int, int] = {}  # by row, as a device keeps it
        self.num_ahead = self.num_late = 0  # steps that were launched ahead; rows of them whose sequences had ended
        self.fails: Callable[[int, int], bool] = lambda order_id, kind: False  # whether a transfer order does
        self.clears: Callable[[], bool] = lambda: False  # whether the prefix cache is cleared before a step
        self.host: dict[int, tuple[int, ...]] = {}
        self.num_moved = self.num_failed = self.num_cleared = 0
        host: dict[str, Any] = {"num_host_blocks": num_host_blocks} if num_host_blocks else {}
        limit = (num_blocks - 1) * block_size
        if len(group_spans) > 1:
            own = tuple(CoreSpan(span.num_tokens, span.is_chunk, span.checkpoint_blocks) for span in group_spans)
            limit = PoolConfig(num_blocks, block_size, max_sequences, 10_000, group_spans=own).limit_tokens
            host["group_spans"] = own
        self.cache: Any = (make_cache or self.default_cache)(num_blocks, block_size, max_sequences, **host)
        limits = Limits(
            *(block_size, limit, max_sequences, max_running, token_budget, chunk_size, prefill_budget, decode_budget),
            num_usable_blocks=num_blocks - 1,
            group_spans=group_spans,
            max_distance=MAX_RETAINED_LEN,
            max_retained_len=MAX_RETAINED_LEN,
            preemption=preemption,
            client_shares=client_shares,
            num_host_blocks=num_host_blocks,
            block_bytes=1,
            max_step_items=max_step_items,
        )
        self.limits = limits
        self.num_full_steps = 0  # that had as many items as a step may have
        self.num_usable_blocks = num_blocks - 1
        self.scheduler = Scheduler(limits, waiting)
        self.now = 0.0  # seconds; a step takes STEP_S
        self.memory: dict[int, tuple[object, ...]] = {}
        self.computed: Counter[tuple[int, int, int]] = Counter()  # (arrival, continuation, position)
        self.outputs: dict[Sequence, list[int]] = {}
        self.requests: list[Request] = []
        self.started: list[Sequence] = []
        self.cancelled: list[Request] = []
        self._cancels: dict[int, list[Request]] = {}  # by step
        self.stop_after: dict[Sequence, int] = {}  # tokens after which a sequence ends by itself, unforeseen
        self.num_steps = self.num_guessed = self.num_kept = 0

    def submit(self, request: Request) -> Request:
        self.scheduler.add(request, self.now)
        self.requests.append(request)
        for sequence in request.sequences:
            self.outputs[sequence] = []
        return request

    def cancel(self, request: Request, after: int = 0) -> None:
        """Now, or before the step after so many more."""
        if after:
            self._cancels.setdefault(self.num_steps + after, []).append(request)
            return
        self.cancelled.append(request)
        for sequence in request.sequences:
            if sequence.state is not SequenceState.ENDED:
                self.scheduler.end_sequence(sequence)

    @property
    def busy(self) -> bool:
        return any(sequence.state is not SequenceState.ENDED for request in self.requests for sequence in request.sequences)

    def create_all(self) -> None:
        while (sequence := self.scheduler.next_to_create()) is not None:
            assert sequence.sequence_id is not None
            try:
                request = sequence.request
                options = {} if request.retention is None else {"retention": request.retention}
                request.start_number = self.cache.create(
                    *(sequence.sequence_id, sequence.token_ids.tolist(), request.max_len),
                    *(request.priority, request.start_number),
                    **options,
                )
            except OutOfSequences:
                self.scheduler.waiting.create_refused(sequence, try_again=True)
                return
            self.scheduler.waiting.created(sequence)

    def step(self) -> Work:
        if not self._overlap or self.num_steps % 2:  # then a step is still computed
            self._cancel_due()
        self.num_steps += 1
        self.now += STEP_S
        self.create_all()
        if self.clears():
            self.cache.clear()
            self.num_cleared += 1
        plan = self.scheduler.schedule(self.now, self._guesses())
        lists = (plan.fork_children, plan.release_ids, plan.swap_out_ids, plan.swap_in_ids, plan.start_ids)
        num_items = sum(map(len, lists))
        assert num_items <= self.limits.max_step_items
        self.num_full_steps += num_items == self.limits.max_step_items
        if self._overlap:
            self.cache.has_step_in_flight = self._in_flight is not None
        answer = self.cache.step(plan)
        before, self._in_flight = self._in_flight, None
        runs_ahead = self._ahead and before is not None and self._may_run_ahead(before, plan, answer)
        if before is not None and not runs_ahead:
            self._finish(before)
        if self._overlap:  # at the worst of times: the plan is made, and not applied yet
            self._cancel_due()
        work = self.scheduler.apply(plan, answer)
        self.started += [sequence for sequence in plan.started if sequence.state is SequenceState.RUNNING]
        flight = self._launch(work, answer)
        if before is not None and runs_ahead:
            self._finish(before)
            self.num_ahead += work.batch is not None
        if self._overlap:
            self._in_flight = flight
        else:
            self._finish(flight)
        return work

    def _may_run_ahead(self, before: Flight, plan: Plan, answer: Any) -> bool:
        has_loads = any((each.transfer_kinds != _SWAP_OUT).any() for each in (before.answer, answer))
        return not has_loads and self.scheduler.find_wait(plan, answer) is None

    def _launch(self, work: Work, answer: Any) -> Flight:
        histories = [tuple(history.tolist()) for history in self.scheduler.histories(work)]
        return Flight(work, answer, histories, self.scheduler.running.num_committed[work.rows].tolist())

    def drop_flight(self) -> None:
        """What the device computes is forgotten, as with a session that was lost."""
        self._in_flight = None

    def _cancel_due(self) -> None:
        for due in [step for step in self._cancels if step <= self.num_steps]:
            for request in self._cancels.pop(due):
                self.cancel(request)

    def _run_orders(self, answer: Any) -> None:
        """As the device does, before the copies."""
        done, failed = self.cache.ended_orders
        columns = (answer.transfer_ids, answer.transfer_kinds, answer.transfer_sources, answer.transfer_destinations)
        for order_id, kind, source, destination in zip(*(column.tolist() for column in columns), strict=True):
            if self.fails(order_id, kind):
                failed.append(order_id)
                continue
            tiers = (self.memory, self.host) if kind == _SWAP_OUT else (self.host, self.memory)
            _copy_block(*tiers, source, destination, self.limits.block_size)
            done.append(order_id)
        self.num_moved += len(done)
        self.num_failed += len(failed)
        if failed:
            self.scheduler.give_up_loads()

    def _finish(self, flight: Flight) -> None:
        """The device runs it, and its tokens are taken."""
        work = flight.work
        self._run_orders(flight.answer)
        for source, destination in work.copies:
            _copy_block(self.memory, self.memory, source, destination, self.limits.block_size)
        self._compute(flight)
        histories = self._whole_histories(flight)
        counts = [len(guesses) + 1 for guesses in work.guesses]
        drawing = [sequence for sequence, count in zip(work.sampled, counts, strict=True) for _ in range(count)]
        drawn = [next_token(history, sequence.index) for history, sequence in zip(histories, drawing, strict=True)]
        if self._ahead:
            self.last_drawn.update(zip(work.sample_rows.tolist(), drawn, strict=False))
        taken = self.scheduler.advance(work, np.array(drawn, np.int32))
        for sequence, guesses, token_ids in zip(work.sampled, work.guesses, taken, strict=True):
            self.num_guessed += len(guesses)
            self.num_kept += len(token_ids) - 1
            if sequence.state is SequenceState.ENDED:
                continue  # it was cancelled while this was computed, or had ended before
            self.outputs[sequence] += token_ids.tolist()
            assert sequence.num_output == len(self.outputs[sequence]) <= sequence.request.max_new_tokens
            limit = min(sequence.request.max_new_tokens, self.stop_after.get(sequence, 10**9))
            if len(self.outputs[sequence]) >= limit:
                del self.outputs[sequence][limit:]  # guesses may have gone further
                self.scheduler.end_sequence(sequence)

    def _whole_histories(self, flight: Flight) -> list[tuple[int, ...]]:
        """With the tokens that the step before drew, where the device has them."""
        histories = flight.histories[:]
        for place in np.flatnonzero(flight.work.awaited).tolist():
            histories[place] += (self.last_drawn[int(flight.work.sample_rows[place])],)
        return histories

    def _guesses(self) -> dict[int, np.ndarray]:
        found = {}
        for row in self.scheduler.running.live.tolist():
            (sequence,) = self.scheduler.running.at(np.array([row]))
            if guess := self.guess(self._tokens(sequence), sequence.index):
                found[row] = np.array(guess, np.int32)
        return found

    def run(self, most_steps: int = 2000) -> None:
        """Until every request has ended and the cache has everything back."""
        while self.busy:
            assert self.num_steps < most_steps, "starvation"
            self.step()
        num_steps = 5 if self._overlap else 3
        for _ in range(num_steps if self.limits.max_step_items > 200 else self.limits.max_known_sequences + num_steps):
            self.step()
        self.cache.has_step_in_flight = False
        assert not self.cache.sequences
        assert not self.scheduler.running.by_id
        assert self.cache.num_reusable_blocks == self.num_usable_blocks

    def check_outputs(self) -> None:
        for request in self.requests:
            for sequence in request.sequences:
                expected = expected_output(request, sequence.index)[: self.stop_after.get(sequence)]
                assert self.outputs[sequence] == (
                    expected[: len(self.outputs[sequence])] if request in self.cancelled else expected
                )

    @property
    def has_step_in_flight(self) -> bool:
        return self._in_flight is not None and self._in_flight.work.batch is not None

    def hold_blocks(self, count: int) -> None:
        """As another engine does, with one sequence for each block; they are not the scheduler's."""
        ids = np.arange(_ELSEWHERE, _ELSEWHERE + count)
        for sequence_id in ids.tolist():
            self.cache.create(sequence_id, [0], 2)
        one, none = np.ones(len(ids), np.int32), np.zeros(len(ids), np.int32)
        reply = self.cache.step(make_plan(start_ids=ids, start_max_new=one, start_max_hit=none, start_may_wait=none))
        assert len(reply.start_block_ids) == count

    def release_held_blocks(self) -> None:
        held = [sequence_id for sequence_id in self.cache.sequences if sequence_id >= _ELSEWHERE]
        self.cache.step(make_plan(release_ids=np.array(held)))

    def lose_session(self, make_cache: Callable[[int, int, int], CoreCache]) -> None:
        """As an engine does after the end of its session: on a new one all requests start again, from the tokens they hold."""
        self._in_flight = None
        self.cache.close()
        self.cache = make_cache(self.num_usable_blocks + 1, self.limits.block_size, self.limits.max_known_sequences)
        assert self.scheduler.reset(self.limits) == []

    def forget(self) -> None:
        """Everything about requests, all of which have ended."""
        assert not self.busy
        for record in (
            self.computed,
            self.outputs,
            self.requests,
            self.started,
            self.cancelled,
            self._cancels,
            self.stop_after,
        ):
            record.clear()

    def _tokens(self, sequence: Sequence) -> tuple[int, ...]:
        if sequence.row is None:
            return tuple(sequence.token_ids.tolist())
        running = self.scheduler.running
        return tuple(running.tokens[sequence.row, : running.num_tokens[sequence.row]].tolist())

    def _compute(self, flight: Flight) -> None:
        work, size = flight.work, self.limits.block_size
        batch = work.batch
        if batch is None:
            return
        assert len(batch.token_ids) <= self.limits.token_budget
        assert len(work.rows) <= self.limits.max_running
        assert work.num_prompt_tokens <= self.limits.prefill_budget
        writes: dict[int, tuple[object, ...]] = {}
        guesses = {sequence: tuple(own.tolist()) for sequence, own in zip(work.sampled, work.guesses, strict=True)}
        token_ids, awaited = batch.token_ids.copy(), batch.awaited_rows
        if awaited is not None:
            for place in np.flatnonzero(awaited >= 0).tolist():
                token_ids[place] = self.last_drawn[int(awaited[place])]
        for item, sequence in enumerate(work.sequences):
            first, last = batch.query_start_loc[item : item + 2].tolist()
            if sequence.state is SequenceState.ENDED:  # what is written for it may not be read
                self.num_late += 1
                for slot in batch.slot_mapping[first:last].tolist():
                    assert size <= slot not in writes, "a late row writes where another one does"
                    writes[slot] = ("late", sequence.request.arrival, sequence.index)
                continue
            assert 0 < last - first <= self.limits.chunk_size + len(guesses.get(sequence, ()))
            tokens, table = self._tokens(sequence) + guesses.get(sequence, ()), batch.block_tables[item].tolist()
            start = int(batch.positions[first])
            kept = sequence.request.retention
            unread = range(0) if kept is None else range(kept.num_sink_tokens, start - kept.num_window_tokens + 1)
            committed = flight.num_committed[item]
            assert kept is None or not any(table[idx] for idx in kept.holes(committed, size)), "a hole names no block"
            assert kept is None or (batch.retention is not None) >= (start + last - first > kept.num_tokens)
            for position in range(start):
                if position not in unread:
                    slot = table[position // size] * size + position % size
                    assert self.memory[slot] == content(tokens[: position + 1], kept), "read through the table"
            assert token_ids[first:last].tolist() == list(tokens[start : start + last - first])
            assert batch.seq_lens[item] == start + last - first
            for row, position in enumerate(range(start, start + last - first), first):
                slot = table[position // size] * size + position % size
                assert batch.slot_mapping[row] == slot
                assert batch.positions[row] == position
                assert size <= slot, "the null block"
                assert slot not in writes, "two writers of a slot"
                writes[slot] = content(tokens[: position + 1], kept)
                self.computed[sequence.request.arrival, sequence.index, position] += 1
        self.memory |= writes


def tiered(num_blocks: int = 8, block_size: int = 2, num_host_blocks: int = 40, **options: Any) -> World:
    """A world on the real core with a host tier."""
    return World(num_blocks, block_size, make_cache=CoreCache, num_host_blocks=num_host_blocks, **options)
