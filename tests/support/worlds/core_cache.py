"""CoreCache: the real pure core behind the interface of TinyColumns, so that scheduler and core are tested as one."""

from typing import Any

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.errors import OutOfSequences
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import Retention, SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId
from kvkeeper.engine_service.scheduler.plan import Plan
from kvkeeper.engine_service.values.request import Retention as EngineRetention
from tests.support.worlds.tiny_columns import OutOfSequences as TinyOutOfSequences

_COLUMNS = set(StepBatch._fields) & set(Plan._fields)


class CoreCache:
    """One session of a pool, its own by default. Audits the core after every step, or after one of so many."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        watermark: float = 0.0,
        manager: PoolManager | None = None,
        session: SessionId = SessionId("s"),  # noqa: B008  # a string
        audit_every: int = 1,
        **config: Any,
    ) -> None:
        self.manager = manager or PoolManager(PoolConfig(num_blocks, block_size, max_sequences, 10_000, watermark, **config))
        self.session = session
        self.manager.sessions.open(session, Executor.ENGINE)
        self.num_reclaim_hint = 0  # in every reply, beside what the pool asks for
        self.has_step_in_flight = False  # the last one's device work has not ended
        self.ended_orders: tuple[list[int], list[int]] = ([], [])  # completed and failed ones, to be reported
        self._step_id = 0
        self._audit_every = audit_every

    @property
    def sequences(self) -> list[int]:
        return self.manager.queries.sequence_ids(self.session).tolist()

    @property
    def num_reusable_blocks(self) -> int:
        self._step_id += 1
        done, failed = (np.array(ids, np.int64) for ids in self.ended_orders)
        batch = StepBatch(self._step_id, self._step_id - 1, completed_transfers=done, failed_transfers=failed)
        self.manager.steps.step(self.session, batch)
        self.manager.steps.complete(self.session, self._step_id)
        stats = self.manager.queries.stats()
        return stats.num_free_blocks + stats.num_cached_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self.manager.queries.stats().num_cached_blocks

    def num_blocks_in_table(self, sequence_id: int) -> int:
        return len(self.manager.queries.view(self.session, SequenceId(sequence_id)).block_table)

    def create(
        self,
        sequence_id: int,
        tokens: list[int],
        max_len: int,
        priority: int = 0,
        start_number: int = 0,
        retention: EngineRetention | None = None,
    ) -> int:
        token_ids = np.array(tokens, np.int32)
        kept = None if retention is None else Retention(retention.num_sink_tokens, retention.num_window_tokens)
        args = SequenceArgs(SequenceId(sequence_id), token_ids, max_len, "", priority, kept, start_number)
        try:
            self.manager.creation.create(self.session, args)
        except OutOfSequences:
            raise TinyOutOfSequences from None
        return self.manager.queries.start_number(self.session, sequence_id)

    def step(self, plan: Plan) -> StepReply:
        self._step_id += 1
        columns = {name: getattr(plan, name) for name in _COLUMNS}
        assert all(
            column.dtype == (np.int64 if "ids" in name or (name.startswith("fork") and name != "fork_lens") else np.int32)
            for name, column in columns.items()
        )
        completed = max(self._step_id - 1 - self.has_step_in_flight, 0)
        done, failed = (np.array(ids, np.int64) for ids in self.ended_orders)
        self.ended_orders = ([], [])
        batch = StepBatch(self._step_id, completed, **columns, completed_transfers=done, failed_transfers=failed)
        reply = self.manager.steps.step(self.session, batch)
        self._audit()
        self.manager.maintenance.publish_pending()
        self._audit()
        return reply._replace(num_reclaim_hint=max(reply.num_reclaim_hint, self.num_reclaim_hint))

    def report(self) -> None:
        """The last step's device work has ended, and no other step follows for now."""
        self.manager.steps.complete(self.session, self._step_id)

    def clear(self) -> None:
        """As an operator does: all that is cached is forgotten."""
        self.manager.prefixes.clear()
        self._audit()

    def close(self) -> None:
        """The session ends, with nothing that still writes."""
        self.manager.sessions.close(self.session, may_still_write=False)

    def _audit(self) -> None:
        if self._step_id % self._audit_every == 0:
            assert self.manager.queries.check_invariants() == []
