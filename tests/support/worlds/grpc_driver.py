"""A pool of a live cache service in this process, driven by kvkeeper.client over a real channel, with its real memory.

Owns a thread with the service's event loop. Engines step on streams; one-item sessions write with WriteKv; the content oracle
reads and writes the mapped arena itself, so what the service copies, clears and hands out is looked at where it lies.
"""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values.copies import Copies
from kvkeeper.cache_service.core.values.errors import CacheError
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import Retention, SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import (
    BlockState,
    Executor,
    Int32Array,
    PressureLevel,
    ReuseHint,
    SequenceId,
    SequenceState,
    SessionId,
)
from kvkeeper.cache_service.core.values.views import PoolStats, SequenceView
from kvkeeper.client.arena import Arena
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.kv_chunks import KvTokens
from kvkeeper.client.new_sequence import NewSequence
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems, StepResult, decode, encode
from tests.support.reference.shadow_memory import ShadowMemory
from tests.support.worlds.cache_api import Api, ManualClock, serving
from tests.support.worlds.scopes import NAMES

T = TypeVar("T")
DEADLINE = 20.0
_EXECUTORS = {Executor.CACHE: pb.EXECUTOR_CACHE, Executor.ENGINE: pb.EXECUTOR_ENGINE}
_ITEMS = [field.name for field in fields(StepItems)]
_REPLY = [name for name in StepResult._fields if name in StepReply._fields]  # the others have their defaults


def step_items(batch: StepBatch) -> StepItems:
    """The core's columns as the client's."""
    return StepItems(**{name: getattr(batch, name) for name in _ITEMS})


def step_reply(result: StepResult) -> StepReply:
    """The client's columns as the core's."""
    return StepReply(**{name: getattr(result, name) for name in _REPLY})


class Refused(CacheError, code="UNKNOWN"):
    """What a service refused, with its reason."""

    def __init__(self, error: KvkeeperError) -> None:
        super().__init__(error.message, **error.metadata)
        self.reason = error.reason


class LoopThread:
    """An event loop that runs in a thread of its own until the end of the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Raises Refused for a call that the service refused."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE)
        except KvkeeperError as error:
            raise Refused(error) from None


class ArenaMemory(ShadowMemory):
    """The same oracle on the mapped arena: a slot's content id is its K, and its V is the same bits.

    The service runs the copies of its own sessions, so `copy` has nothing to do and `spoil` leaves their destinations alone.
    """

    def __init__(self, arena: Arena, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, _Slots(arena.array.view(np.int32).reshape(num_blocks, 2, block_size)))

    def let_go(self) -> None:
        """An arena is unmapped only when nothing looks at it."""
        self._slots = []

    def spoil(self, blocks: Any) -> None:
        """Nothing: real memory keeps what it held, and a read before a write sees another prefix."""

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Nothing: the service has copied."""


class _Slots(list[int]):
    """The K words of an arena as one list of slots; a write puts the same bits into V."""

    def __init__(self, words: Any) -> None:
        self._words = words
        self._size = words.shape[2]

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[slot] for slot in range(at.start, at.stop)]
        key, value = self._words[at // self._size, :, at % self._size].tolist()
        return key if key == value else -1

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(at, slice):
            for slot, content in zip(range(at.start, at.stop), value, strict=True):
                self[slot] = content
        else:
            self._words[at // self._size, :, at % self._size] = value

    def __len__(self) -> int:
        return int(self._words.shape[0]) * self._size

    def __iter__(self) -> Any:
        return (self[slot] for slot in range(len(self)))


def _retention_message(retention: Retention | None) -> pb.Retention | None:
    if retention is None:
        return None
    return pb.Retention(num_sink_tokens=retention.num_sink_tokens, num_window_tokens=retention.num_window_tokens)


def _retention_of(info: pb.SequenceInfo) -> Retention | None:
    kept = info.retention
    return Retention(kept.num_sink_tokens, kept.num_window_tokens) if info.HasField("retention") else None


class GrpcDriver:
    """See drivers.Driver. The service's threshold is the default one."""

    publishes_itself = True
    reclaim_at_once = 10**9  # more than a tiny pool has

    def __init__(self, config: PoolConfig, thread: LoopThread) -> None:
        default = PoolConfig(2, 1)
        self.config = replace(config, evict_above=default.evict_above)
        self._thread = thread
        self._stack = AsyncExitStack()
        self._sessions: dict[SessionId, AsyncCacheSession] = {}
        self._arenas: dict[SessionId, Arena] = {}
        self._last_step: dict[SessionId, tuple[bytes, StepReply]] = {}
        self._clock = ManualClock()
        self._run(self._start())

    async def _start(self) -> None:
        config = self.config
        self.api: Api = await self._stack.enter_async_context(
            serving(
                clock=self._clock,
                num_blocks=config.num_blocks,
                max_sequences=config.max_sequences,
                max_tokens_per_sequence=config.max_tokens_per_sequence,
                prefix_caching=config.prefix_caching,
                eviction_policy=config.eviction_policy,
                prefix_ttl=config.prefix_ttl,
                min_prefix_tokens=config.min_prefix_tokens,
                max_cached_blocks=config.max_cached_blocks,
                tenant_quota=config.tenant_quota,
                logits_memory=config.logits_memory,
                watermark=config.watermark,
                soon_share=config.soon_share,
                pressure_levels=config.pressure_levels,
            )
        )
        self._client = await self._stack.enter_async_context(AsyncCacheClient(self.api.server.address))
        self._observer = await self._client.open_session(self._spec(), pb.EXECUTOR_ENGINE)
        self._observed = await self._observer.attach()

    def close(self) -> None:
        self._run(self._stop())

    async def _stop(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._memory.let_go()
        for arena in (self._observed, *self._arenas.values()):
            arena.close()
        await self._observer.close()
        await self._stack.aclose()

    def _spec(self) -> pb.KvSpec:
        return pb.KvSpec(model_id="machine", num_layers=1, num_kv_heads=1, head_dim=1, kv_dtype=pb.KV_DTYPE_FLOAT32,
                         block_size=self.config.block_size, layout=pb.KV_LAYOUT_BLOCK_MAJOR)  # fmt: skip

    def memory(self) -> ShadowMemory:
        self._memory = ArenaMemory(self._observed, self.config.num_blocks, self.config.block_size)
        return self._memory

    def write_kv(self, session: SessionId, sequence_id: int, first_token_idx: int, contents: list[int]) -> bool:
        words = np.array(contents, np.int32).view(np.float32).reshape(1, -1, 1, 1)
        self._run(self._sessions[session].write_kv(sequence_id, first_token_idx, KvTokens(words, words)))
        return True

    def open_session(self, executor: Executor) -> SessionId:
        session = self._run(self._client.open_session(self._spec(), _EXECUTORS[executor]))
        self._sessions[SessionId(session.session_id)] = session
        return SessionId(session.session_id)

    def close_session(self, session: SessionId, *, may_still_write: bool) -> tuple[int, int]:
        """A session that may still write is one that has mapped the arena and does not say that it has drained."""
        if may_still_write:
            self._arenas[session] = self._run(self._sessions[session].attach())
        closed = self._run(self._sessions[session].close(drained=not may_still_write))
        if not may_still_write:
            del self._sessions[session]
        return closed.num_released_sequences, closed.num_quarantined_blocks

    def end_quarantine(self, session: SessionId) -> None:
        self._run(self._sessions.pop(session).close(drained=True))
        self._arenas.pop(session).close()

    def create_sequence(self, session: SessionId, args: SequenceArgs) -> int:
        """By both calls that there are, in turns."""
        fields = (
            *(args.sequence_id, args.token_ids, args.max_tokens, NAMES[args.scope][0], args.priority),
            _retention_message(args.retention),
            args.start_number,
            int(args.reuse_hint),
            round(args.retain_seconds * 1000),
        )
        names = dict(zip(("adapter", "cache_salt"), NAMES[args.scope][1:], strict=True))
        if args.sequence_id % 2:
            return self._run(self._sessions[session].create_sequence(*fields, **names)).num_matched_tokens
        (created,) = self._run(self._sessions[session].create_sequences([NewSequence(*fields, **names)]))
        if isinstance(created, KvkeeperError):
            raise Refused(created)
        return created.num_matched_tokens

    def step(self, session: SessionId, batch: StepBatch) -> StepReply:
        items = step_items(batch)
        live = self._sessions[session]
        assert batch.step_id == live.step_id + 1
        result = self._run(live.step(items, batch.completed_step_id))
        raw = encode(items, live.session_id, live.epoch, batch.step_id, batch.completed_step_id)
        reply = step_reply(result)
        self._last_step[session] = raw, reply
        return reply

    def repeat_step(self, session: SessionId) -> bool:
        """By the other way in: what was asked on the stream is asked again as a unary call."""
        raw, reply = self._last_step[session]

        async def send() -> bytes:
            answer: bytes = await self.api.raw_step(raw, timeout=DEADLINE)
            return answer

        again = [decode(self._run(send())) for _ in range(2)]
        return all(np.array_equal(getattr(one, name), getattr(reply, name)) for one in again for name in _REPLY)

    def complete(self, session: SessionId, completed_step_id: int) -> None:
        self._run(self._sessions[session].renew(completed_step_id))

    def extend(self, session: SessionId, sequence_id: int, num_tokens: int, *, look_up: bool) -> Copies | None:
        self._run(self._sessions[session].extend(sequence_id, num_tokens, look_up))
        return None

    def commit(
        self, session: SessionId, sequence_id: int, num_tokens: int, first_token_idx: int, token_ids: Int32Array
    ) -> None:
        self._run(self._sessions[session].commit(sequence_id, num_tokens, first_token_idx, token_ids))

    def fork(self, session: SessionId, parent_id: int, child_id: int, num_tokens: int) -> None:
        self._run(self._sessions[session].fork(parent_id, child_id, num_tokens))

    def truncate(self, session: SessionId, sequence_id: int, num_tokens: int) -> None:
        self._run(self._sessions[session].truncate(sequence_id, num_tokens))

    def release(self, session: SessionId, sequence_id: int) -> int:
        return self._run(self._sessions[session].release(sequence_id))

    def update(
        self, session: SessionId, sequence_id: int, retention: Retention | None, reuse_hint: ReuseHint | None = None
    ) -> None:
        kept = _retention_message(retention)
        self._run(self._sessions[session].update(sequence_id, retention=kept, reuse_hint=reuse_hint))

    def reuse_hint(self, block: int) -> ReuseHint:
        session = next(iter(self._sessions.values()))
        return ReuseHint(self._run(session.get_block(block)).reuse_hint)

    def hand_off(self, session: SessionId, sequence_id: int) -> bytes:
        return self._run(self._sessions[session].hand_off(sequence_id))

    def withdraw(self, session: SessionId, sequence_id: int) -> None:
        self._run(self._sessions[session].withdraw(sequence_id))

    def take(self, session: SessionId, offer: bytes, sequence_id: int) -> list[int]:
        return list(self._run(self._sessions[session].take(offer, sequence_id)).block_table)

    def shown(self, sequences: list[tuple[SessionId, SequenceId]]) -> object:
        views = [self.view(session, sequence_id) for session, sequence_id in sequences]
        return [(v.sequence_id, v.state, v.num_tokens, v.num_committed_tokens, v.num_reserved_tokens,
                 v.block_table.tolist()) for v in views]  # fmt: skip

    def view(self, session: SessionId, sequence_id: int) -> SequenceView:
        info = self._run(self._sessions[session].get(sequence_id))
        return SequenceView(
            sequence_id=SequenceId(info.sequence_id),
            session_id=SessionId(info.session_id),
            state=SequenceState(info.state),
            num_tokens=info.num_tokens,
            num_committed_tokens=info.num_committed_tokens,
            num_reserved_tokens=info.num_reserved_tokens,
            max_tokens=info.max_tokens,
            priority=info.priority,
            num_hit_tokens=info.num_hit_tokens,
            num_accesses=info.num_accesses,
            block_table=np.array(info.block_table, np.int32),
            retention=_retention_of(info),
            start_number=info.start_number,
            reuse_hint=ReuseHint(info.reuse_hint),
        )

    def match_prefix(self, session: SessionId, scope: str, token_ids: Int32Array) -> list[int]:
        match = self._run(self._sessions.get(session, self._observer).match_prefix(token_ids, *NAMES[scope]))
        assert match.num_matched_tokens == len(match.block_ids) * self.config.block_size
        return list(match.block_ids)

    def pin_prefix(self, session: SessionId, scope: str, token_ids: Int32Array, ttl: float) -> tuple[str, int]:
        answer = self._run(self._sessions[session].pin_prefix(token_ids, round(ttl * 1000), *NAMES[scope]))
        return answer.pin_id, answer.num_pinned_tokens

    def unpin_prefix(self, session: SessionId, pin_id: str) -> None:
        self._run(self._sessions[session].unpin_prefix(pin_id))

    def hint_prefix(self, session: SessionId, scope: str, token_ids: Int32Array, hint: ReuseHint, seconds: float) -> int:
        ms = round(seconds * 1000)
        tenant, adapter, salt = NAMES[scope]
        names = {"tenant": tenant, "adapter": adapter, "cache_salt": salt}
        prefix = pb.PrefixHint(token_ids=token_ids, **names, reuse_hint=int(hint), retain_ms=ms)
        (num_tokens,) = self._run(self._sessions[session].hint_prefixes(prefix))
        return num_tokens

    def store_logits(self, session: SessionId, sequence_id: int, num_tokens: int, logits: bytes) -> None:
        self._run(self._sessions[session].store_logits(sequence_id, num_tokens, np.frombuffer(logits, np.float32)))

    def read_logits(self, session: SessionId, sequence_id: int) -> bytes:
        return self._run(self._sessions[session].read_logits(sequence_id)).tobytes()

    def clear_prefix_cache(self, session: SessionId) -> tuple[int, int]:
        cleared = self._run(self._sessions[session].clear_prefix_cache())
        return cleared.num_freed_blocks, cleared.num_forgotten_blocks

    def evict_blocks(self, session: SessionId, num_free_blocks: int) -> int:
        return self._run(self._sessions[session].evict_blocks(num_free_blocks)).num_evicted_blocks

    def evict_excess(self) -> int:
        return 0  # the threshold is the default one, at which nothing is evicted

    def stats(self) -> PoolStats:
        (pool,) = self._run(self._client.stats()).pools
        values = {field.name: getattr(pool, field.name) for field in pool.DESCRIPTOR.fields}
        return PoolStats(**values | {"pressure": PressureLevel(pool.pressure)})

    def reclaim(self, max_blocks: int) -> bool:
        return False

    def publish_pending(self, max_blocks: int | None) -> bool:
        return False

    def check_invariants(self) -> list[str]:
        return list(self._run(self._client.check_invariants()).violations)

    def advance(self, seconds: float) -> None:
        """In short pieces with renewals between, so that no lease ends."""

        async def pass_time(piece: float) -> None:
            self._clock.advance(piece)
            live = [session for session_id, session in self._sessions.items() if session_id not in self._arenas]
            for session in (self._observer, *live):
                await session.renew()

        left = seconds
        while left > 0:
            self._run(pass_time(min(left, 5.0)))
            left -= 5.0

    def block_states(self) -> list[BlockState] | None:
        return None

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)
