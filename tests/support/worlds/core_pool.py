"""A pool of the core for tests that say what happens, item by item.

Owns step ids, so that a test names only the items it is about; audits after every call. Items are plain tuples in the order
of the protocol's columns.
"""

from collections.abc import Sequence

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.scopes import make_scope
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import BlockId, BlockState, Executor, Int32Array, SequenceId, SessionId
from kvkeeper.cache_service.core.values.views import SequenceView

A, B = SessionId("a"), SessionId("b")
ALL = 10_000  # most hit tokens of a start that may take all it finds


def int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)


def step_batch(
    step_id: int,
    completed: int,
    *,
    commits: Sequence[tuple[int, int, Sequence[int]]] = (),
    forks: Sequence[tuple[int, int, int]] = (),
    truncates: Sequence[tuple[int, int]] = (),
    releases: Sequence[int] = (),
    starts: Sequence[tuple[int, int, int]] = (),
    reserves: Sequence[tuple[int, int, int]] = (),
) -> StepBatch:
    """commits: id, length, new tokens; forks: parent, child, length; starts: id, most new, most hit; reserves: id, min, max."""
    return StepBatch(
        step_id=step_id,
        completed_step_id=completed,
        commit_ids=np.array([item[0] for item in commits], np.int64),
        commit_lens=int32([item[1] for item in commits]),
        commit_num_new=int32([len(item[2]) for item in commits]),
        commit_tokens=int32([token for item in commits for token in item[2]]),
        fork_parents=np.array([item[0] for item in forks], np.int64),
        fork_children=np.array([item[1] for item in forks], np.int64),
        fork_lens=int32([item[2] for item in forks]),
        truncate_ids=np.array([item[0] for item in truncates], np.int64),
        truncate_lens=int32([item[1] for item in truncates]),
        release_ids=np.array(releases, np.int64),
        start_ids=np.array([item[0] for item in starts], np.int64),
        start_max_new=int32([item[1] for item in starts]),
        start_max_hit=int32([item[2] for item in starts]),
        reserve_ids=np.array([item[0] for item in reserves], np.int64),
        reserve_min=int32([item[1] for item in reserves]),
        reserve_max=int32([item[2] for item in reserves]),
    )


def compute(manager: PoolManager, session: SessionId, sequence_id: int, tokens: Sequence[int]) -> None:
    """A prompt by one-item calls, committed whole."""
    manager.creation.create(session, SequenceArgs(SequenceId(sequence_id), int32(tokens)))
    manager.one_item.extend(session, sequence_id, len(tokens), look_up=True)
    manager.one_item.commit(session, sequence_id, len(tokens), 0, int32(tokens))
    assert manager.queries.check_invariants() == []


class CorePool:
    """A manager with sessions a and b, which step as engines do. takes_partial: hits may end within a block."""

    def __init__(self, num_blocks: int = 9, block_size: int = 4, *, takes_partial: bool = False, **config: object) -> None:
        config.setdefault("watermark", 0.0)
        self.manager = PoolManager(PoolConfig(num_blocks, block_size, **config))  # type: ignore[arg-type]
        self.step_ids = {A: 0, B: 0}
        for session in self.step_ids:
            self.manager.sessions.open(session, Executor.ENGINE, takes_partial=takes_partial)

    def create(self, sequence_id: int, tokens: Sequence[int], *, session: SessionId = A, **args: object) -> int:
        args["scope"] = make_scope(*(str(args.pop(name, "")) for name in ("tenant", "adapter", "salt")))
        return self.manager.creation.create(session, SequenceArgs(SequenceId(sequence_id), int32(tokens), **args))  # type: ignore[arg-type]

    def step(self, session: SessionId = A, *, lag: int = 0, publish: bool = True, **items: Sequence[object]) -> StepReply:
        """The session's next step; lag is how many steps before it are still in flight. Its commits are published after it."""
        step_id = self.step_ids[session] + 1
        reply = self.manager.steps.step(session, step_batch(step_id, step_id - 1 - lag, **items))  # type: ignore[arg-type]
        self.step_ids[session] = step_id
        self.audit()
        if publish:
            self.manager.maintenance.publish_pending()
            self.audit()
        return reply

    def prefill(self, sequence_id: int, tokens: Sequence[int], *, session: SessionId = A, **args: object) -> list[int]:
        """Creates, starts and commits a whole prompt. Returns its table."""
        self.create(sequence_id, tokens, session=session, **args)
        self.step(session, starts=[(sequence_id, ALL, ALL)])
        self.step(session, commits=[(sequence_id, len(tokens), [])])
        return self.table(sequence_id, session=session)

    def release(self, *sequence_ids: int, session: SessionId = A) -> None:
        """Ends sequences, and the step that may still read what they held."""
        self.step(session, releases=sequence_ids)
        self.step(session)

    def cache(self, tokens: Sequence[int], tenant: str = "", **args: object) -> None:
        """A sequence computes these tokens and ends."""
        self.prefill(1, tokens, tenant=tenant, **args)
        self.release(1)

    def evicted(self, *prompts: list[int]) -> list[int]:
        """With blocks of one token: all tokens of the prompts in the order of their eviction, one at a time."""
        order: list[int] = []
        while left := [prompt for prompt in prompts if self.matched(prompt)]:
            before = [len(self.matched(prompt)) for prompt in left]
            self.manager.evictions.evict_count(1)
            self.audit()
            after = [len(self.matched(prompt)) for prompt in left]
            prompt, length = next((p, b) for p, b, a in zip(left, before, after, strict=True) if a < b)
            order.append(prompt[length - 1])
        return order

    def pass_time(self, seconds: float) -> bool:
        """Moves the clock, and does what is due. Whether something is left to do."""
        self.manager.state.tick(self.manager.state.now + seconds)
        is_left = self.manager.maintenance.do_due_work()
        self.audit()
        return is_left

    def view(self, sequence_id: int, *, session: SessionId = A) -> SequenceView:
        return self.manager.queries.view(session, SequenceId(sequence_id))

    def table(self, sequence_id: int, *, session: SessionId = A) -> list[int]:
        return [int(block) for block in self.view(sequence_id, session=session).block_table]

    def counters(self, sequence_id: int, *, session: SessionId = A) -> tuple[int, int, int]:
        """(tokens, committed, reserved)"""
        view = self.view(sequence_id, session=session)
        return view.num_tokens, view.num_committed_tokens, view.num_reserved_tokens

    def state(self, block: int) -> BlockState:
        return self.manager.state.pool.state(BlockId(block))

    def matched(self, tokens: Sequence[int], tenant: str = "", adapter: str = "", salt: str = "") -> list[int]:
        scope = make_scope(tenant, adapter, salt)
        return [int(block) for block in self.manager.queries.match_prefix(scope, int32(tokens)).blocks]

    def audit(self) -> None:
        assert self.manager.queries.check_invariants() == []
