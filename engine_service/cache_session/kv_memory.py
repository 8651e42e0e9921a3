"""KvMemory: one session on the cache service, its arena mapped into this process, and the model on top of it.

The engine keeps no K or V of its own: what is here is a view of the cache service's memory. Between open and close the
session is live and the memory mapped; close unmaps before it tells the cache service that nothing writes any more.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable

import grpc
import numpy as np
import structlog
import torch

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.arena import Arena
from kvkeeper.client.cache import AsyncCacheClient, AsyncCacheSession
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.steps import StepItems, StepResult

from ..compute.model_runner import Runner
from ..compute.served_model import ServedModel
from ..config import EngineConfig
from ..scheduler.plan import Plan
from ..scheduler.state.limits import Limits
from ..scheduler.state.preemption_cost import Moved, Preemption
from .lease import Lease

log = structlog.get_logger()

_MAX_NAME_PART = 100  # of the 256 characters of a session's name; an address has at most 112
_SWAP_OUT = 1  # TransferKind of the protocol
_OWN_BOUND = "see --max-tokens-per-sequence of the engine service"
_CACHE_BOUND = "see --max-tokens-per-sequence of the cache service, and its --max-sequences"
_POOL_BOUND = "the pool holds no more, see --pool-memory and --num-blocks of the cache service"
_COLUMNS = tuple(StepItems.__dataclass_fields__.keys() & Plan.__dataclass_fields__.keys())


_NOTHING = torch.empty((0, 1), dtype=torch.uint8)


def arena_tensor(arena: Arena) -> torch.Tensor:
    """The arena as torch sees it, uint8 [arena_bytes], without a copy."""
    if arena.is_on_device:
        lent = arena.device_bytes()
        return torch.as_tensor(lent, device=torch.device("cuda", lent.device))
    return torch.from_numpy(arena.array)


def _take_time(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Begins to take time; the first call ends it, the second gives the seconds, once the device has got so far."""
    if device.type == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()

        def end() -> Callable[[], float]:
            last.record()
            return lambda: first.elapsed_time(last) / 1000

        return end
    begun_at = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - begun_at
        return lambda: seconds

    return stop


class KvMemory:
    """See the module. Make it with open_memory."""

    def __init__(self, session: AsyncCacheSession, arena: Arena, memory: torch.Tensor, runner: Runner) -> None:
        """memory: arena_tensor of the arena."""
        self.session = session
        self.lease = Lease(session.ttl_ms / 1000)
        self._runner: Runner | None = runner
        self._arena = arena
        self._blocks = memory.view(-1, session.pool.block_bytes)  # uint8 [num_blocks, block_bytes]
        self._hosts = torch.from_numpy(arena.host_array).view(-1, session.pool.block_bytes)
        self._done: list[int] = []  # transfer orders that have ended and were not reported yet
        self._failed: list[int] = []
        self._done_now: list[int] = []  # of the step that is computed: the worker thread's until it has ended
        self._failed_now: list[int] = []
        self._num_moved_bytes = 0  # by the orders of the step that is computed
        self._moving_seconds: Callable[[], float] = float  # that this took

    @property
    def runner(self) -> Runner:
        """The model on this memory, until close."""
        assert self._runner is not None, "the memory is unmapped"
        return self._runner

    async def step(self, plan: Plan, completed_step_id: int | None = None, traceparent: str = "") -> StepResult:
        """Send the plan, as part of a span where there is one. Raises KvkeeperError."""
        columns = {name: getattr(plan, name) for name in _COLUMNS}
        done, failed = self._take_ended()
        if done or failed:
            columns["completed_transfers"] = np.array(done, np.int64)
            columns["failed_transfers"] = np.array(failed, np.int64)
        sent_at = self.lease.now()
        answer = await self.session.step(StepItems(**columns), completed_step_id, traceparent)
        self.lease.renewed(sent_at)
        return answer

    async def renew(self, completed_step_id: int = 0) -> None:
        """Renew the lease, and report what has ended. Raises KvkeeperError."""
        done, failed = self._take_ended()
        sent_at = self.lease.now()
        if done or failed:
            await self.session.renew(completed_step_id, done, failed)
        else:
            await self.session.renew(completed_step_id)
        self.lease.renewed(sent_at)

    async def require_lease(self) -> None:
        """What was read from the blocks until now was this session's to read. Raises KvkeeperError where it was not."""
        if not self.lease.is_certain:
            await self.renew()

    @property
    def has_ended_orders(self) -> bool:
        """Whether the cache service is still to hear of transfer orders."""
        return bool(self._done or self._failed)

    def run_orders(self, answer: StepResult) -> None:
        """Run the transfer orders of a step, in order; before its copies, because their sources may be written again.

        In the worker thread.
        """
        if not len(answer.transfer_ids):
            return
        took = _take_time(self._blocks.device)
        columns = (answer.transfer_ids, answer.transfer_kinds, answer.transfer_sources, answer.transfer_destinations)
        for order_id, kind, source, destination in zip(*(column.tolist() for column in columns), strict=True):
            try:
                if kind == _SWAP_OUT:
                    self._hosts[destination].copy_(self._blocks[source], non_blocking=True)
                else:
                    self._blocks[destination].copy_(self._hosts[source], non_blocking=True)
                self._done_now.append(order_id)
            except (IndexError, RuntimeError):  # torch raises the latter for all else that can be wrong with a copy
                log.error("transfer_failed", order_id=order_id)
                self._failed_now.append(order_id)
        self._num_moved_bytes, self._moving_seconds = len(self._done_now) * self._blocks.shape[1], took()

    def note_ended_orders(self) -> bool:
        """The step has been computed: its orders are to be reported. Whether one has failed."""
        has_failed = bool(self._failed_now)
        self._done += self._done_now
        self._failed += self._failed_now
        self._done_now, self._failed_now = [], []
        return has_failed

    def take_moved(self) -> Moved:
        """What the orders of the step that has been computed moved."""
        moved = Moved(self._num_moved_bytes, self._moving_seconds()) if self._num_moved_bytes else Moved()
        self._num_moved_bytes = 0
        return moved

    def _take_ended(self) -> tuple[list[int], list[int]]:
        """What is reported is forgotten: when the report is lost, so is the session, and its orders with it."""
        ended = self._done, self._failed
        self._done, self._failed = [], []
        return ended

    async def close(self, *, is_away: bool = False) -> None:
        """Unmap, then end the session. No thread may be computing.

        is_away: nobody would answer; the end of the attach connection says enough to a service that lives.
        """
        self._runner = None
        self._blocks = self._hosts = _NOTHING
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


def client_name(model: ServedModel, address: str) -> str:
    """Which engine a session is of, for people who look at several: its model, where it listens, its process."""
    return f"kvkeeper-engine {model.model_id[:_MAX_NAME_PART]} {address} pid {os.getpid()}"


async def open_memory(client: AsyncCacheClient, model: ServedModel, config: EngineConfig, address: str = "") -> KvMemory:
    """Open a session for the model, attach, and put the model on the memory. Raises KvkeeperError.

    address: of this engine.
    """
    layout = model.layout(config.block_size)
    name = client_name(model, address)
    session = await client.open_session(
        model.kv_spec(config.block_size), pb.EXECUTOR_ENGINE, ttl_ms=config.lease_ms, client_name=name
    )
    try:
        _require_device(session.pool, model.device)
        arena = await session.attach()
        assert session.pool.block_bytes == layout.block_bytes, "both services compute a block's size alike"
        arena.pin_hosts()
        memory = arena_tensor(arena)
        return KvMemory(session, arena, memory, model.make_runner(layout.view(memory), layout))
    except BaseException:
        with contextlib.suppress(KvkeeperError):
            await session.close()
        raise


def _require_device(pool: pb.PoolInfo, device: torch.device) -> None:
    """Raises KvkeeperError where the pool's memory is not what the model computes on."""
    is_cuda = pool.arena_kind == pb.ARENA_KIND_CUDA_IPC
    if is_cuda != (device.type == "cuda"):
        where, flag = ("CUDA memory", "cuda") if is_cuda else ("the host's memory", "cpu")
        raise KvkeeperError(
            grpc.StatusCode.FAILED_PRECONDITION, message=f"its pools are in {where}: start this engine with --device {flag}"
        )


def limits_of(pool: pb.PoolInfo, model: ServedModel, config: EngineConfig) -> Limits:
    """What the scheduler may do on this pool."""
    own = _OWN_BOUND, config.max_tokens_per_sequence or pool.max_tokens_with_retention
    of_cache = _CACHE_BOUND, pool.max_tokens_with_retention
    of_pool = _POOL_BOUND, (pool.num_blocks - 1) * pool.block_size
    of_model = f"the model has {model.max_len} positions", model.max_len
    bound, max_len = min((of_model, of_pool, of_cache, own), key=lambda bounded: bounded[1])  # of equals the first
    retained_bound, most = min((of_cache, own), key=lambda bounded: bounded[1])
    max_running = min(config.max_sequences, pool.max_sequences)
    return Limits(
        block_size=pool.block_size,
        max_len=max_len,
        max_known_sequences=pool.max_sequences,
        max_running=max_running,
        token_budget=config.token_budget,
        chunk_size=config.chunk_size,
        prefill_budget=config.prefill_budget,
        decode_budget=config.decode_budget or max_running,
        preemption=Preemption(config.preemption),
        num_host_blocks=pool.num_host_blocks,
        block_bytes=pool.block_bytes,
        prefix_caching=pool.prefix_caching,
        num_usable_blocks=pool.num_blocks - 1,
        max_distance=model.max_len,
        max_retained_len=0 if model.refuses_retention else most,
        bound=bound,
        retained_bound=retained_bound,
    )
