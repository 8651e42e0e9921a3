"""How a test reaches a pool: one small interface, so that the same machine drives the core and a live service.

Owns: the interface, its core implementation and the bytes by which a step is told from another. The core driver puts the
exactly-once gate of the session in front of the manager, as the service does.
"""

from typing import Protocol

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.copies import Copies
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import Retention, SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import BlockId, BlockState, Executor, Int32Array, ReuseHint, SequenceId, SessionId
from kvkeeper.cache_service.core.values.views import PoolStats, SequenceView
from kvkeeper.cache_service.runtime.lease import Session, SessionTable
from tests.support.reference.shadow_memory import ShadowMemory


def encode(columns: StepBatch | StepReply) -> bytes:
    """Bytes that differ when any column does."""
    parts = [value.tobytes() if isinstance(value, np.ndarray) else b"%d" % value for value in columns]
    return b"".join((repr([*map(len, parts)]).encode(), *parts))


class Driver(Protocol):
    """A pool with sessions. Every method raises the CacheError that the call was refused with."""

    config: PoolConfig
    publishes_itself: bool  # what steps commit, after the reply and before another call
    reclaim_at_once: int  # blocks given back with the end of a session; the rest by `reclaim`

    def memory(self) -> ShadowMemory:
        """What the pool's blocks hold."""

    def write_kv(self, session: SessionId, sequence_id: int, first_token_idx: int, contents: list[int]) -> bool:
        """Writes slots of a one-item session. False where a pool has no such call."""

    def open_session(self, executor: Executor) -> SessionId: ...

    def close_session(self, session: SessionId, *, may_still_write: bool) -> tuple[int, int]: ...

    def end_quarantine(self, session: SessionId) -> None: ...

    def create_sequence(self, session: SessionId, args: SequenceArgs) -> int: ...

    def step(self, session: SessionId, batch: StepBatch) -> StepReply: ...

    def repeat_step(self, session: SessionId) -> bool:
        """Sends the session's last step again. Whether the same bytes came back."""

    def complete(self, session: SessionId, completed_step_id: int) -> None: ...

    def extend(self, session: SessionId, sequence_id: int, num_tokens: int, *, look_up: bool) -> Copies | None:
        """None where the service ran the copies itself and does not tell them."""

    def commit(
        self, session: SessionId, sequence_id: int, num_tokens: int, first_token_idx: int, token_ids: Int32Array
    ) -> None: ...

    def fork(self, session: SessionId, parent_id: int, child_id: int, num_tokens: int) -> None: ...

    def truncate(self, session: SessionId, sequence_id: int, num_tokens: int) -> None: ...

    def release(self, session: SessionId, sequence_id: int) -> int: ...

    def update(
        self, session: SessionId, sequence_id: int, retention: Retention | None, reuse_hint: ReuseHint | None = None
    ) -> None: ...

    def reuse_hint(self, block: int) -> ReuseHint:
        """The hint that the block's place in the eviction order comes from."""

    def hand_off(self, session: SessionId, sequence_id: int) -> bytes: ...

    def withdraw(self, session: SessionId, sequence_id: int) -> None: ...

    def take(self, session: SessionId, offer: bytes, sequence_id: int) -> list[int]:
        """Returns the table."""

    def view(self, session: SessionId, sequence_id: int) -> SequenceView: ...

    def shown(self, sequences: list[tuple[SessionId, SequenceId]]) -> object:
        """What a call that is refused must not change: another value for any change of these sequences or a block."""

    def match_prefix(self, session: SessionId, scope: str, token_ids: Int32Array) -> list[int]: ...

    def pin_prefix(self, session: SessionId, scope: str, token_ids: Int32Array, ttl: float) -> tuple[str, int]: ...

    def unpin_prefix(self, session: SessionId, pin_id: str) -> None: ...

    def hint_prefix(self, session: SessionId, scope: str, token_ids: Int32Array, hint: ReuseHint, seconds: float) -> int: ...

    def store_logits(self, session: SessionId, sequence_id: int, num_tokens: int, logits: bytes) -> None: ...

    def read_logits(self, session: SessionId, sequence_id: int) -> bytes: ...

    def clear_prefix_cache(self, session: SessionId) -> tuple[int, int]: ...

    def evict_blocks(self, session: SessionId, num_free_blocks: int) -> int: ...

    def evict_excess(self) -> int:
        """What the service does by itself between steps."""

    def stats(self) -> PoolStats: ...

    def check_invariants(self) -> list[str]: ...

    def publish_pending(self, max_blocks: int | None) -> bool:
        """Whether more is left."""

    def reclaim(self, max_blocks: int) -> bool:
        """Whether more is left."""

    def advance(self, seconds: float) -> None:
        """Time passes, and what fell due by itself has happened."""

    def block_states(self) -> list[BlockState] | None:
        """None where the pool does not tell."""


class CoreDriver:
    """The pure core behind its own exactly-once gate; `now` is the virtual clock of its test."""

    publishes_itself = False

    def __init__(self, config: PoolConfig, *, max_sessions: int = 64, reclaim_at_once: int = 10**9) -> None:
        self.config = config
        self.reclaim_at_once = reclaim_at_once
        self.manager = PoolManager(config)
        self.manager.reclaim.at_once = reclaim_at_once
        self.table = SessionTable(epoch=1, max_sessions=max_sessions)
        self.sessions: dict[SessionId, Session] = {}
        self._num_opened = self._num_pins = self._num_offers = 0
        self._last_raw: dict[SessionId, bytes] = {}

    @property
    def now(self) -> float:
        return self.manager.state.now

    @now.setter
    def now(self, seconds: float) -> None:
        self.manager.state.tick(seconds)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.manager.maintenance.do_due_work()

    def memory(self) -> ShadowMemory:
        return ShadowMemory(self.config.num_blocks, self.config.block_size)

    def write_kv(self, session: SessionId, sequence_id: int, first_token_idx: int, contents: list[int]) -> bool:
        return False

    def open_session(self, executor: Executor) -> SessionId:
        self._num_opened += 1
        session_id = SessionId(f"{self._num_opened:032x}")
        self.sessions[session_id] = self.table.open(session_id, executor, 10.0, "test", self.now)
        self.manager.sessions.open(session_id, executor)
        return session_id

    def close_session(self, session: SessionId, *, may_still_write: bool) -> tuple[int, int]:
        self.table.end_session(self.sessions.pop(session))
        result = self.manager.sessions.close(session, may_still_write=may_still_write)
        return result.num_released_sequences, result.num_quarantined_blocks

    def end_quarantine(self, session: SessionId) -> None:
        self.manager.sessions.end_quarantine(session)

    def create_sequence(self, session: SessionId, args: SequenceArgs) -> int:
        return self.manager.creation.create(session, args)

    def step(self, session: SessionId, batch: StepBatch) -> StepReply:
        """A step that arrives for the first time."""
        gate, raw = self.sessions[session], encode(batch)
        assert gate.find_repeat(batch.step_id, raw) is None
        gate.check_completed(batch.step_id, batch.completed_step_id)
        reply = self.manager.steps.step(session, batch)
        self.manager.state.misses.counts()  # before a block comes and goes twice, of which the log may forget the first time
        gate.record(batch.step_id, batch.completed_step_id, raw, encode(reply))
        self._last_raw[session] = raw
        return reply

    def repeat_step(self, session: SessionId) -> bool:
        gate = self.sessions[session]
        return gate.find_repeat(gate.step_id, self._last_raw[session]) == gate.last_reply

    def complete(self, session: SessionId, completed_step_id: int) -> None:
        self.sessions[session].complete(completed_step_id)
        self.manager.steps.complete(session, completed_step_id)

    def extend(self, session: SessionId, sequence_id: int, num_tokens: int, *, look_up: bool) -> Copies | None:
        copies = self.manager.one_item.extend(session, SequenceId(sequence_id), num_tokens, look_up=look_up)
        self.manager.state.misses.counts()
        return copies

    def commit(
        self, session: SessionId, sequence_id: int, num_tokens: int, first_token_idx: int, token_ids: Int32Array
    ) -> None:
        self.manager.one_item.commit(session, SequenceId(sequence_id), num_tokens, first_token_idx, token_ids)

    def fork(self, session: SessionId, parent_id: int, child_id: int, num_tokens: int) -> None:
        self.manager.one_item.fork(session, SequenceId(parent_id), SequenceId(child_id), num_tokens)

    def truncate(self, session: SessionId, sequence_id: int, num_tokens: int) -> None:
        self.manager.one_item.truncate(session, SequenceId(sequence_id), num_tokens)

    def release(self, session: SessionId, sequence_id: int) -> int:
        return self.manager.one_item.release(session, SequenceId(sequence_id))

    def update(
        self, session: SessionId, sequence_id: int, retention: Retention | None, reuse_hint: ReuseHint | None = None
    ) -> None:
        self.manager.updates.update(session, sequence_id, retention=retention, reuse_hint=reuse_hint)

    def reuse_hint(self, block: int) -> ReuseHint:
        return self.manager.queries.block_view(block).reuse_hint

    def hand_off(self, session: SessionId, sequence_id: int) -> bytes:
        self._num_offers += 1
        return self.manager.hand_offs.offer(session, sequence_id, self._num_offers.to_bytes(16))

    def withdraw(self, session: SessionId, sequence_id: int) -> None:
        self.manager.hand_offs.withdraw(session, sequence_id)

    def take(self, session: SessionId, offer: bytes, sequence_id: int) -> list[int]:
        self.manager.hand_offs.take(session, offer, sequence_id)
        return self.view(session, sequence_id).block_table.tolist()

    def view(self, session: SessionId, sequence_id: int) -> SequenceView:
        return self.manager.queries.view(session, SequenceId(sequence_id))

    def shown(self, sequences: list[tuple[SessionId, SequenceId]]) -> object:
        """From the columns of the core, because views of all sequences would take most of a simulation's time."""
        seqs, pool = self.manager.state.sequences, self.manager.state.pool
        live = seqs.live_slots()
        of_sequences = (seqs.ids, seqs.owners, seqs.states, seqs.num_tokens, seqs.num_committed, seqs.num_reserved)
        holders = (pool.ref_counts, pool.fence_counts, pool.quarantine_counts, pool.transfer_counts)
        of_blocks = (*holders, pool.indexed, pool.is_filling, pool.free.ids())
        tables = [seqs.tables.get(slot).tobytes() for slot in live.tolist()]
        columns = [*(column[live] for column in of_sequences), *of_blocks]
        return sequences, tables, [column.tobytes() for column in columns]

    def match_prefix(self, session: SessionId, scope: str, token_ids: Int32Array) -> list[int]:
        return [int(block) for block in self.manager.queries.match_prefix(scope, token_ids).blocks]

    def pin_prefix(self, session: SessionId, scope: str, token_ids: Int32Array, ttl: float) -> tuple[str, int]:
        self._num_pins += 1
        return tuple(self.manager.prefixes.pin(session, f"{self._num_pins:032x}", scope, token_ids, ttl))

    def unpin_prefix(self, session: SessionId, pin_id: str) -> None:
        self.manager.prefixes.unpin(session, pin_id)

    def hint_prefix(self, session: SessionId, scope: str, token_ids: Int32Array, hint: ReuseHint, seconds: float) -> int:
        return self.manager.prefixes.hint(session, scope, token_ids, hint, seconds)

    def store_logits(self, session: SessionId, sequence_id: int, num_tokens: int, logits: bytes) -> None:
        self.manager.prefixes.store_logits(session, sequence_id, num_tokens, logits)

    def read_logits(self, session: SessionId, sequence_id: int) -> bytes:
        return self.manager.prefixes.read_logits(session, sequence_id)

    def clear_prefix_cache(self, session: SessionId) -> tuple[int, int]:
        result = self.manager.prefixes.clear()
        return result.num_freed_blocks, result.num_forgotten_blocks

    def evict_blocks(self, session: SessionId, num_free_blocks: int) -> int:
        return self.manager.evictions.evict_blocks(num_free_blocks)

    def evict_excess(self) -> int:
        return self.manager.evictions.evict_excess(1 << 30)

    def stats(self) -> PoolStats:
        return self.manager.queries.stats()

    def reclaim(self, max_blocks: int) -> bool:
        return self.manager.sessions.reclaim_blocks(max_blocks)

    def publish_pending(self, max_blocks: int | None) -> bool:
        return self.manager.maintenance.publish_pending(max_blocks)

    def check_invariants(self) -> list[str]:
        return self.manager.queries.check_invariants()

    def block_states(self) -> list[BlockState] | None:
        return [self.manager.state.pool.state(BlockId(block)) for block in range(self.config.num_blocks)]
