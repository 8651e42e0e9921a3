"""KvMemory: one session on the cache service, its arena mapped into this process, and the model on top of it.

The engine keeps no K or V of its own: what is here is a view of the cache service's memory. Between open and close the
session is live and the memory mapped; close unmaps before it tells the cache service that nothing writes any more.
"""

import contextlib
import gc

import structlog
import torch

from engine_service.config import EngineConfig
from engine_service.model_runner import Runner
from engine_service.plan import Limits, Plan
from engine_service.served_model import ServedModel
from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.arena import Arena
from kvkeeper.client.cache import AsyncCacheClient, AsyncCacheSession
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.steps import StepItems, StepResult

log = structlog.get_logger()

_COLUMNS = tuple(StepItems.__dataclass_fields__.keys() & Plan.__dataclass_fields__.keys())


class KvMemory:
    """See the module. Make it with open_memory."""

    def __init__(self, session: AsyncCacheSession, arena: Arena, runner: Runner) -> None:
        self.session = session
        self._runner: Runner | None = runner
        self._arena = arena

    @property
    def runner(self) -> Runner:
        """The model on this memory, until close."""
        assert self._runner is not None, "the memory is unmapped"
        return self._runner

    async def step(self, plan: Plan, completed_step_id: int | None = None) -> StepResult:
        """Send the plan. Raises KvkeeperError."""
        items = StepItems(**{name: getattr(plan, name) for name in _COLUMNS})
        return await self.session.step(items, completed_step_id)

    async def close(self, *, is_away: bool = False) -> None:
        """Unmap, then end the session. No thread may be computing.

        is_away: nobody would answer; the end of the attach connection says enough to a service that lives.
        """
        self._runner = None
        gc.collect()  # a cycle around a traceback may still view the arena
        drained = True
        try:
            self._arena.close()
        except BufferError:
            drained = False  # a view lives on, so the cache service has to wait for the end of this process
            log.error("arena_still_viewed")
        if not is_away:
            with contextlib.suppress(KvkeeperError):  # the session is gone, or the service: both end it
                await self.session.close(drained=drained)


async def open_memory(client: AsyncCacheClient, model: ServedModel, config: EngineConfig) -> KvMemory:
    """Open a session for the model, attach, and put the model on the memory. Raises KvkeeperError."""
    layout = model.layout(config.block_size)
    session = await client.open_session(
        model.kv_spec(config.block_size), pb.EXECUTOR_ENGINE, ttl_ms=config.lease_ms, client_name="kvkeeper-engine"
    )
    try:
        arena = await session.attach()
        assert session.pool.block_bytes == layout.block_bytes, "both services compute a block's size alike"
        kv_view = layout.view(torch.from_numpy(arena.array))
        return KvMemory(session, arena, model.make_runner(kv_view, layout))
    except BaseException:
        with contextlib.suppress(KvkeeperError):
            await session.close()
        raise


def limits_of(pool: pb.PoolInfo, model: ServedModel, config: EngineConfig) -> Limits:
    """What the scheduler may do on this pool."""
    bounds = [model.max_len, pool.max_tokens_per_sequence, (pool.num_blocks - 1) * pool.block_size]
    if config.max_tokens_per_sequence is not None:
        bounds.append(config.max_tokens_per_sequence)
    return Limits(
        block_size=pool.block_size,
        max_len=min(bounds),
        max_known_sequences=pool.max_sequences,
        max_running=min(config.max_sequences, pool.max_sequences),
        token_budget=config.token_budget,
        chunk_size=config.chunk_size,
    )
