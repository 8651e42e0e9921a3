"""Replies are the same bytes with and without forecasts, whatever engines and others do between their steps.

Most steps are steady, because only those are foretold. In the others sequences start, end, fork, are cut and swapped, requests
are wrong or repeated, and beside them blocks are evicted, leases are renewed with completions, and the pool is asked questions.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest

from kvkeeper.cache_service.core.step.expected import ExpectedReplies, OpenStep
from kvkeeper.cache_service.core.step.waiting_starts import WaitingStart, WaitingStarts
from kvkeeper.cache_service.core.values.errors import InvalidField
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.core.values.types import ItemResult, ReuseHint, SequenceId, SessionId, StartResult
from kvkeeper.cache_service.rpc import step_handler
from kvkeeper.cache_service.rpc.foretold import ForetoldBytes
from kvkeeper.cache_service.runtime.live_session import LiveSession
from kvkeeper.cache_service.runtime.pool import Pool
from kvkeeper.client.steps import StepItems, StepResult, decode
from tests.support.worlds.foretold_pair import Outcome, Side

NUM_STEPS = 10_000  # of each of the ten worlds
_WIDE = {entry.name for entry in fields(StepItems) if entry.default_factory().dtype.itemsize == 8}  # type: ignore[misc]


@dataclass(eq=False)
class _Sequence:
    id: int
    known: int
    max_tokens: int
    committed: int = 0
    grants: list[tuple[int, int]] = field(default_factory=list)  # (step, reserved so far)

    @property
    def reserved(self) -> int:
        return self.grants[-1][1]

    def reserved_by(self, step_id: int) -> int:
        return max((length for granted_in, length in self.grants if granted_in <= step_id), default=0)


class _Engine:
    """One session, on both sides, and what its replies have told it."""

    def __init__(
        self, sides: tuple[Side, Side], lives: tuple[LiveSession, ...], rng: random.Random, lag: int, most_token: int
    ) -> None:
        self.most_token = most_token
        self.sides, self.lives, self.rng, self.lag = sides, lives, rng, lag
        self.step_id = self.next_id = 0
        self.waiting: list[_Sequence] = []
        self.running: list[_Sequence] = []
        self.loading: list[_Sequence] = []
        self.swapped: list[_Sequence] = []
        self.orders: list[int] = []
        self.last: tuple[StepItems, int, int] | None = None

    def create(self) -> None:
        rng, length = self.rng, self.rng.randint(1, 24)
        tokens = np.array(rng.choices((0, 1), (5, 1), k=length), np.int32)
        self.next_id += 1
        sequence = _Sequence(
            self.next_id, length, min(length + rng.randint(1, 150), self.sides[0].pool.info.max_tokens_per_sequence)
        )
        tenant, priority = rng.choice(("", "", "", "x")), rng.randint(0, 1)
        hint = rng.choice((ReuseHint.UNSPECIFIED, ReuseHint.UNSPECIFIED, ReuseHint.NONE, ReuseHint.SOON))
        for side, live in zip(self.sides, self.lives, strict=True):
            args = SequenceArgs(SequenceId(sequence.id), tokens, sequence.max_tokens, tenant, priority, reuse_hint=hint)
            side.sessions.require(live.core.id, live.core.epoch)
            side.pool.manager.create_sequence(live.core.id, args)
            if sequence.id % 4:  # the answer comes before the others' turn
                side.handler.prepare(live)
        self.waiting.append(sequence)

    def step(self, *, is_steady: bool) -> bool:
        """One step of both sides; whether it was lawful."""
        rng, step_id = self.rng, self.step_id + 1
        completed = max(step_id - self.lag, 0)
        columns: dict[str, list[int]] = {}

        def put(**items: Iterable[int]) -> None:
            for name, values in items.items():
                columns.setdefault(name, []).extend(values)

        for q in self.running:
            length = q.reserved_by(completed)
            if length > q.committed:
                num_new = max(min(length + 1, q.max_tokens) - q.known, 0)  # the tokens up to the one that follows
                q.known, q.committed = q.known + num_new, length
                tokens = [rng.randint(0, self.most_token) for _ in range(num_new)]
                put(commit_ids=[q.id], commit_lens=[length], commit_num_new=[num_new], commit_tokens=tokens)
        over = [q for q in self.running if q.reserved >= q.max_tokens]
        if self.running and not is_steady and rng.random() < 0.6:
            over += rng.sample(self.running, min(rng.choice((1, 1, 2, 3)), len(self.running)))
        over = list(dict.fromkeys(over))
        stay = [q for q in self.running if q not in over]
        forks: list[tuple[_Sequence, _Sequence]] = []
        swap_outs: list[_Sequence] = []
        swap_ins: list[_Sequence] = []
        if not is_steady and rng.random() < 0.3 and stay and (parent := rng.choice(stay)).committed:
            self.next_id += 1
            length = rng.randint(1, parent.committed)
            child = _Sequence(self.next_id, length, parent.max_tokens, length)
            forks.append((parent, child))
            put(fork_parents=[parent.id], fork_children=[child.id], fork_lens=[length])
        if not is_steady and rng.random() < 0.2 and stay and (cut := rng.choice(stay)).committed:
            length = rng.randint(1, cut.committed)
            cut.known, cut.committed = length, length
            cut.grants = [(granted_in, min(reserved, length)) for granted_in, reserved in cut.grants]
            put(truncate_ids=[cut.id], truncate_lens=[length])
        put(release_ids=[q.id for q in over])
        if not is_steady and rng.random() < 0.3 and stay:
            swap_outs = [stay.pop(rng.randrange(len(stay)))]
            put(swap_out_ids=[q.id for q in swap_outs])
        if self.swapped and rng.random() < 0.3:
            swap_ins = self.swapped[:1]
            put(swap_in_ids=[q.id for q in swap_ins])
        starts = self.waiting[: rng.randint(0, 2)] if not is_steady or rng.random() < 0.2 else []
        if starts:
            most = [rng.choice((3, 1000, 1000, 1000)) for _ in starts]
            hits = [rng.choice((0, 1000, 1000)) for _ in starts]
            put(start_ids=[q.id for q in starts], start_max_new=most, start_max_hit=hits)
            if rng.random() < 0.8:
                put(start_may_wait=[int(hit > 0) for hit in hits])
        wants = [q for q in stay if q not in [parent for parent, _ in forks]]
        targets = [min(max(q.reserved + 1, q.known), q.max_tokens) for q in wants]
        put(reserve_ids=[q.id for q in wants], reserve_min=targets, reserve_max=targets)
        if self.orders and rng.random() < 0.5:
            put(completed_transfers=self.orders)
            self.orders = []
        kept = {name: np.array(values, np.int64 if name in _WIDE else np.int32) for name, values in columns.items()}
        reply = self._send(StepItems(**kept), step_id, completed)
        if reply is None:
            return False
        self.step_id = step_id
        self._take(reply, step_id, over, forks, swap_outs, swap_ins, starts, list(zip(wants, targets, strict=True)))
        return True

    def _send(self, items: StepItems, step_id: int, completed: int) -> StepResult | None:
        rng = self.rng
        if rng.random() < 0.02:  # a request that is wrong in one place changes nothing
            lens = items.commit_lens + np.int32(rng.choice((1, 50)))
            wrong = StepItems(commit_ids=items.commit_ids, commit_lens=lens, commit_num_new=items.commit_num_new,
                              commit_tokens=items.commit_tokens, reserve_ids=items.reserve_ids,
                              reserve_min=items.reserve_min, reserve_max=items.reserve_max)  # fmt: skip
            if len(lens) and lens[0] > 40:
                self._both(wrong, step_id + rng.randint(0, 1), completed)
        reply = self._both(items, step_id, completed)[0]
        if not isinstance(reply, bytes):
            return None
        self.last = (items, step_id, completed)
        return decode(reply)

    def _both(self, items: StepItems, step_id: int, completed: int) -> Outcome:
        is_seen = self.rng.random() < 0.1
        first, second = (
            side.step(live, items, step_id, completed, is_seen=is_seen)
            for side, live in zip(self.sides, self.lives, strict=True)
        )
        assert first == second, (step_id, items)
        return first

    def repeat(self) -> None:
        if self.last is not None:
            self._both(*self.last)

    def renew(self) -> None:
        """A completion that comes without a step."""
        for side, live in zip(self.sides, self.lives, strict=True):
            side.sessions.require(live.core.id, live.core.epoch, published=False)
            live.core.complete(self.step_id)
            side.pool.manager.complete(live.core.id, self.step_id)

    def _take(
        self,
        reply: StepResult,
        step_id: int,
        over: list[_Sequence],
        forks: list[tuple[_Sequence, _Sequence]],
        swap_outs: list[_Sequence],
        swap_ins: list[_Sequence],
        starts: list[_Sequence],
        wants: list[tuple[_Sequence, int]],
    ) -> None:
        self.running = [q for q in self.running if q not in over]
        self.orders += reply.transfer_ids.tolist()
        for q, result in zip(swap_outs, reply.swap_out_results.tolist(), strict=True):
            if result == ItemResult.OK:
                self.running.remove(q)
                self.swapped.append(q)
        for q, result in zip(swap_ins, reply.swap_in_results.tolist(), strict=True):
            if result == ItemResult.OK:
                self.swapped.remove(q)
                self.loading.append(q)
        for (q, target), reserved in zip(wants, reply.reserve_reserved.tolist(), strict=True):
            if reserved >= target:
                q.grants = [*q.grants[-2:], (step_id, reserved)]
        for (_, child), result in zip(forks, reply.fork_results.tolist(), strict=True):
            if result == ItemResult.OK:
                child.grants = [(step_id, child.committed)]
                self.running.append(child)
        columns = (reply.start_results, reply.start_hits, reply.start_reserved)
        for q, result, hit, reserved in zip(starts, *(column.tolist() for column in columns), strict=True):
            if result == StartResult.STARTED:
                q.committed, q.grants = hit, [(step_id, reserved)]
                self.running.append(q)
            elif result == StartResult.LOADING:
                self.loading.append(q)
            if result in (StartResult.STARTED, StartResult.LOADING):
                self.waiting.remove(q)
        ready = zip(reply.ready_ids.tolist(), reply.ready_hits.tolist(), reply.ready_reserved.tolist(), strict=True)
        for sequence_id, hit, reserved in ready:
            for q in [q for q in (*self.loading, *self.swapped) if q.id == sequence_id]:
                (self.loading if q in self.loading else self.swapped).remove(q)
                q.committed, q.grants = max(q.committed, hit), [(step_id, reserved)]
                self.running.append(q)


async def _live_through(seed: int, num_steps: int, *, is_roomy: bool) -> None:
    """is_roomy: there are free blocks for most steps, and an engine steps a few times in a row; else blocks are short."""
    rng = random.Random(seed)
    block_size, num_tokens = rng.choice((1, 2, 4)), rng.choice((400, 1000, 3000))  # that the pool can hold
    if is_roomy:
        num_tokens = 20_000
    config = PoolConfig(
        num_blocks=1 + num_tokens // block_size,
        block_size=block_size,
        max_sequences=40,
        max_tokens_per_sequence=200,
        eviction_policy=("adaptive", "lru", "lfu")[seed % 3],
        prefix_caching=is_roomy or seed % 5 != 4,
        num_host_blocks=200 if seed % 2 and not is_roomy else 0,
        evict_above=0.5 if is_roomy else 1.0,
        watermark=rng.choice((0.0, 0.05)),
        min_prefix_tokens=rng.choice((0, 0, 5)) if not is_roomy else 0,
    )
    sides = Side(config, foretells=True), Side(config, foretells=False)

    async def engine() -> _Engine:
        lag, most_token = rng.randint(1, 1 if is_roomy else 2), 1000 if is_roomy else 1
        return _Engine(sides, tuple([await side.open() for side in sides]), rng, lag, most_token)

    engines = [await engine() for _ in range(3)]
    chosen = engines[0]
    for step_idx in range(num_steps):
        for side in sides:
            side.clock.now = step_idx * 0.01
        if not is_roomy or chosen not in engines or rng.random() < 0.2:
            chosen = rng.choice(engines)
        if len(chosen.waiting) < 3 and len(chosen.running) + len(chosen.waiting) < 8 and rng.random() < 0.3:
            chosen.create()
        is_lawful = chosen.step(is_steady=rng.random() < (0.7 if is_roomy else 0.95))
        if rng.random() < 0.05:
            chosen.repeat()
        if rng.random() < 0.05:
            chosen.renew()
        if rng.random() < 0.02:
            for side in sides:
                side.pool.manager.evict_count(min(3, side.pool.stats().num_cached_blocks))
        if not is_lawful or rng.random() < 0.0005:
            closed = engines.pop(engines.index(chosen))
            for side, live in zip(sides, closed.lives, strict=True):
                side.sessions.close(live.core.id, live.core.epoch, drained=True)
            engines.append(await engine())
        if rng.random() < 0.01:
            assert sides[0].pool.stats() == sides[1].pool.stats()
        if rng.random() < 0.002:
            assert [side.pool.manager.check_invariants() for side in sides] == [[], []]


@pytest.fixture(autouse=True)
def _no_client_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests, to let all of them go first takes longer than a step."""
    monkeypatch.setattr(step_handler.os, "sched_yield", lambda: None)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the paths that this is about were taken."""
    counts = Counter[str]()
    tell, postpone, read = ExpectedReplies.reply, Pool.postpone_step, ForetoldBytes.step
    find, look_up = WaitingStarts.find, WaitingStarts._look_up

    def noted_reply(self: ExpectedReplies, session: SessionId, step: OpenStep) -> StepReply | None:
        reply = tell(self, session, step)
        if reply is not None and len(reply.start_hits):
            counts["told with starts"] += 1
            counts["told with hits"] += max(reply.start_hits.tolist()) > 0
        counts["told with releases"] += reply is not None and step.has_releases
        return reply

    def noted_look_up(*args: Any) -> object:
        counts["looked up"] += 1
        return look_up(*args)

    def noted_find(*args: Any) -> list[WaitingStart] | None:
        before = counts["looked up"]
        found = find(*args)
        if found and counts["looked up"] == before:
            counts["known ahead"] += 1
            counts["hits known ahead"] += max(len(start.hit) for start in found) > 0
        return found

    def noted_step(*args: Any) -> object:
        counts["foretold"] += 1
        return read(*args)

    def noted_postponing(*args: Any) -> None:
        counts["applied after the answer"] += 1
        postpone(*args)

    monkeypatch.setattr(ExpectedReplies, "reply", noted_reply)
    monkeypatch.setattr(ForetoldBytes, "step", noted_step)
    monkeypatch.setattr(Pool, "postpone_step", noted_postponing)
    monkeypatch.setattr(WaitingStarts, "find", noted_find)
    monkeypatch.setattr(WaitingStarts, "_look_up", noted_look_up)
    return counts


@pytest.mark.parametrize("seed", range(10))
def test_replies_are_the_same_bytes_with_and_without_forecasts(seed: int, counts: Counter[str]) -> None:
    asyncio.run(_live_through(seed, NUM_STEPS, is_roomy=False))
    assert counts["foretold"] > NUM_STEPS / 20


@pytest.mark.parametrize("seed", range(5))
def test_replies_that_are_told_before_their_step_is_applied_are_those_of_the_step(seed: int, counts: Counter[str]) -> None:
    asyncio.run(_live_through(seed, NUM_STEPS, is_roomy=True))
    assert counts["applied after the answer"] > NUM_STEPS / 20
    kinds = ("told with starts", "told with hits", "told with releases", "known ahead", "hits known ahead")
    assert min(counts[kind] for kind in kinds) > NUM_STEPS / 1000


class _Pair:
    """One session on both sides, which takes the same calls."""

    def __init__(self, lag: int) -> None:
        """lag: steps that are not completed when the next one comes."""
        self.sides = Side(PoolConfig(65, 4), foretells=True), Side(PoolConfig(65, 4), foretells=False)
        self._lag = lag

    async def open(self) -> None:
        self.lives = [await side.open() for side in self.sides]

    def create(self, sequence_id: int, prompt: np.ndarray, max_tokens: int = 64) -> None:
        for side, live in zip(self.sides, self.lives, strict=True):
            side.pool.manager.create_sequence(live.core.id, SequenceArgs(SequenceId(sequence_id), prompt, max_tokens))
            side.handler.prepare(live)

    def step(self, step_id: int, **columns: list[int]) -> StepResult:
        """A lawful step, which both sides answer alike."""
        items = StepItems(**{name: np.array(of, np.int64 if name in _WIDE else np.int32) for name, of in columns.items()})
        completed = max(step_id - self._lag, 0)
        both = [side.step(live, items, step_id, completed) for side, live in zip(self.sides, self.lives, strict=True)]
        assert both[0] == both[1]
        assert isinstance(both[0][0], bytes), "it is lawful"
        return decode(both[0][0])


def test_a_release_of_one_that_only_commits_and_one_that_only_reserves() -> None:
    """With two steps in flight: the first has its most tokens, the third has just started."""

    async def run() -> None:
        pair = _Pair(lag=2)
        await pair.open()
        for sequence_id, max_tokens in ((1, 14), (2, 64), (3, 64)):
            pair.create(sequence_id, np.arange(12, dtype=np.int32) + 100 * sequence_id, max_tokens)
        pair.step(1, start_ids=[1, 2], start_max_new=[12, 12], start_max_hit=[0, 0])
        pair.step(2, reserve_ids=[1, 2], reserve_min=[13, 13], reserve_max=[13, 13])
        pair.step(3, commit_ids=[1, 2], commit_lens=[12, 12], commit_num_new=[1, 1], commit_tokens=[7, 7],
                  start_ids=[3], start_max_new=[12], start_max_hit=[0],
                  reserve_ids=[1, 2], reserve_min=[14, 14], reserve_max=[14, 14])  # fmt: skip
        assert pair.lives[0].foretold is not None
        pair.step(4, commit_ids=[1, 2], commit_lens=[13, 13], commit_num_new=[1, 1], commit_tokens=[7, 7],
                  release_ids=[1, 3], reserve_ids=[2], reserve_min=[15], reserve_max=[15])  # fmt: skip

    asyncio.run(run())


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_hit_that_was_looked_up_ahead_counts_while_it_is_there(is_evicted: bool, counts: Counter[str]) -> None:
    async def run() -> None:
        pair = _Pair(lag=1)
        await pair.open()
        shared = np.arange(13, dtype=np.int32) + 500
        pair.create(1, np.arange(12, dtype=np.int32))
        pair.create(2, shared)
        pair.step(1, start_ids=[1, 2], start_max_new=[12, 13], start_max_hit=[0, 0])
        pair.step(2, commit_ids=[1, 2], commit_lens=[12, 13], commit_num_new=[1, 1], commit_tokens=[7, 7],
                  reserve_ids=[1, 2], reserve_min=[13, 14], reserve_max=[13, 14])  # fmt: skip
        pair.step(3, commit_ids=[1, 2], commit_lens=[13, 14], commit_num_new=[1, 1], commit_tokens=[7, 7],
                  release_ids=[2], reserve_ids=[1], reserve_min=[14], reserve_max=[14])  # fmt: skip
        pair.create(3, shared)
        if is_evicted:
            assert [side.pool.manager.evict_count(3) for side in pair.sides] == [3, 3]
        reply = pair.step(4, commit_ids=[1], commit_lens=[14], commit_num_new=[1], commit_tokens=[7],
                          start_ids=[3], start_max_new=[13], start_max_hit=[12],
                          reserve_ids=[1], reserve_min=[15], reserve_max=[15])  # fmt: skip
        assert reply.start_hits.tolist() == [0 if is_evicted else 12]
        assert counts["told with starts"] > 0
        assert counts["known ahead"] == (not is_evicted)

    asyncio.run(run())


async def test_a_foretold_step_has_no_more_items_than_another(counts: Counter[str]) -> None:
    config = PoolConfig(2048, 2, max_sequences=1024, max_tokens_per_sequence=64)
    for side in (Side(config, foretells=True), Side(config, foretells=False)):
        live = await side.open()
        for number in range(1, 600):
            args = SequenceArgs(SequenceId(number), np.array([number], np.int32))
            side.pool.manager.create_sequence(live.core.id, args)
        side.step(live, StepItems(**_starts(range(1, 2))), 1, 0)
        for step_id, ids in ((2, range(0)), (3, range(2, 259)), (3, range(2, 258))):
            columns: dict[str, Any] = _starts(ids)
            decoding = {"commit_ids": 1, "commit_lens": step_id - 1, "commit_num_new": 1, "commit_tokens": 7}
            decoding |= {"reserve_ids": 1, "reserve_min": step_id, "reserve_max": step_id}
            columns |= {name: _column(name, [value]) for name, value in decoding.items()}
            outcome = side.step(live, StepItems(**columns), step_id, step_id - 1)
            assert (outcome[0] is InvalidField) == (len(ids) > 256), outcome
        assert side.pool.manager.check_invariants() == []
    assert counts["told with starts"] > 0


def _starts(ids: range) -> dict[str, Any]:
    columns = {"start_ids": ids, "start_max_new": [1] * len(ids), "start_max_hit": [0] * len(ids)}
    return {name: _column(name, values) for name, values in columns.items()}


def _column(name: str, values: Iterable[int]) -> Any:
    return np.array(list(values), np.int64 if name in _WIDE else np.int32)
