"""KvMemory: one session on the cache service, its arena mapped into this process, and the model on top of it.

The engine keeps no K or V of its own: what is here is a view of the cache service's memory. Between open and close the
session is live and the memory mapped; close unmaps before it reports to the cache service that nothing writes any more.
"""

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from functools import partial
from traceback import clear_frames

import grpc
import numpy as np
import structlog
import torch

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.arena import Arena
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.new_sequence import NewSequence
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems, StepResult
from kvkeeper.common.service.threads import in_thread, in_thread_or_here
from kvkeeper.kernels.quantised.host_blocks import HostBlocks

from ..compute.device.device_errors import ReportedFault, keep_until_end, lost_by
from ..compute.model_runner import AnyLayout, Runner, StepBounds
from ..compute.served_model import ServedModel
from ..config import EngineConfig
from ..ranks.mapped_arena import arena_tensor, host_blocks, make_packing
from ..ranks.messages import RankLost, RankRefused
from ..ranks.ranked_runner import RankedRunner
from ..ranks.ranks import Ranks, make_attachment
from ..scheduler.plan import Plan
from ..values.request import Sequence, TakenBlocks
from .failures import is_invalid, is_unknown_sequence, rank_lost, refuses_groups
from .kv_spec import get_host_format, make_kv_spec
from .lease import Lease
from .pool_limits import make_limits
from .transfer_runner import TransferRunner

log = structlog.get_logger()

_MAX_NAME_PART = 100  # of the 256 characters of a session's name; an address has at most 112
_RENEWALS = 3  # in the time of a lease
_COLUMNS = tuple(StepItems.__dataclass_fields__.keys() & set(Plan._fields))


class KvMemory:
    """A live session and the memory of its pool, from open_memory until close."""

    def __init__(
        self,
        session: AsyncCacheSession,
        arena: Arena,
        transfers: TransferRunner,
        runner: Runner,
        ranks: Ranks | None = None,
    ) -> None:
        """transfers, runner: on views of the arena, which close drops. ranks: the others, on their arenas of the session."""
        self._ranks = ranks
        self.session = session
        self.transfers = transfers
        self.lease = Lease(session.ttl_ms / 1000)
        self.kv_utilization = 0.0  # share of the pool's blocks that are referenced, as of the last step
        self._runner: Runner | None = runner
        self._arena = arena
        self._num_usable_blocks = max(session.pool.num_blocks - 1, 1)

    @property
    def runner(self) -> Runner:
        """The model on this memory, until close."""
        assert self._runner is not None, "the memory is unmapped"
        return self._runner

    async def step(self, plan: Plan, completed_step_id: int | None = None, traceparent: str = "") -> StepResult:
        """Send the plan, as part of a span where there is one. Raises KvkeeperError."""
        self.require_ranks()
        columns = {name: getattr(plan, name) for name in _COLUMNS}
        done, failed = self.transfers.take_ended()
        if done or failed:
            columns["completed_transfers"] = np.array(done, np.int64)
            columns["failed_transfers"] = np.array(failed, np.int64)
        sent_at = self.lease.now()
        answer = await self.session.step(StepItems(**columns), completed_step_id, traceparent)
        self.lease.renewed(sent_at)
        self.kv_utilization = 1 - (answer.num_free + answer.num_evictable) / self._num_usable_blocks
        return answer

    async def offer(self, sequence_id: int) -> bytes:
        """Offer a sequence, that no running step works on, to another session. Raises KvkeeperError."""
        return await self.session.hand_off(sequence_id)

    async def take(self, offer: bytes, sequence_id: int) -> TakenBlocks:
        """Take a sequence that another session offers, under an id of this one's. Raises KvkeeperError."""
        taken = await self.session.take(offer, sequence_id)
        tables = [taken.block_table, *(group.block_table for group in taken.group_tables)]
        table = np.concatenate([np.array(each, np.int32) for each in tables])
        return TakenBlocks(sequence_id, taken.num_tokens, taken.num_committed_tokens, taken.num_reserved_tokens, table)

    async def withdraw(self, sequence_id: int) -> bool:
        """End the offer of a sequence. Whether it is still this session's. Raises KvkeeperError."""
        try:
            await self.session.withdraw(sequence_id)
        except KvkeeperError as error:
            if is_unknown_sequence(error):
                return False
            raise
        return True

    async def renew(self, completed_step_id: int = 0) -> None:
        """Renew the lease, and report the transfer orders that ended. Raises KvkeeperError."""
        self.require_ranks()
        done, failed = self.transfers.take_ended()
        sent_at = self.lease.now()
        if done or failed:
            await self.session.renew(completed_step_id, done, failed)
        else:
            await self.session.renew(completed_step_id)
        self.lease.renewed(sent_at)

    async def require_lease(self) -> None:
        """Make sure that the blocks read until now were still this session's, and all ranks there.

        Raises KvkeeperError where they may not be.
        """
        self.require_ranks()
        if not self.lease.is_certain:
            await self.renew()

    def require_ranks(self) -> None:
        """Raises KvkeeperError where one of them is lost: nothing can be computed any more, and what was last may be wrong.

        Raises ReportedFault where its device is lost to it.
        """
        if self._ranks is not None and (why := self._ranks.lost):
            if (fault := self._ranks.fault) is not None:
                raise ReportedFault(fault)
            raise rank_lost(why)

    async def close(self, *, is_away: bool = False, is_lost: bool = False) -> None:
        """Unmap on all ranks, then end the session. No thread may be computing.

        is_away: the cache service does not answer. The end of the attach connection says enough to a service that lives.
        is_lost: the device of a rank is, so that nothing can be unmapped, and what it still writes is not known. The session
        ends, and the cache service waits for the end of the processes of all ranks, as it does for one that was killed.
        """
        if is_lost:
            keep_until_end(self)
            if self._ranks is not None:
                await in_thread_or_here(self._ranks.stop)
            await self._end_session(is_away=is_away, drained=False)
            return
        drained = self._ranks is None or await in_thread_or_here(self._ranks.detach)
        self._runner = None
        self.transfers.drop_blocks()
        gc.collect()  # a cycle around a traceback may still view the arena
        try:
            self._arena.close()
        except BufferError:
            drained = False  # a view lives on, so the cache service has to wait for the end of this process
            log.error("arena_still_viewed")
        await self._end_session(is_away=is_away, drained=drained)

    async def _end_session(self, *, is_away: bool, drained: bool) -> None:
        self.session.disconnect()
        if not is_away:
            with contextlib.suppress(KvkeeperError):  # the session or the service is gone: the session ends either way
                await self.session.close(drained=drained)


async def create_sequences(session: AsyncCacheSession, sequences: SequenceOf[Sequence]) -> list[int | KvkeeperError]:
    """Report waiting sequences to the cache service, in one call.

    The start number of each, or why it was refused. Raises KvkeeperError where that is not known.
    """
    try:
        created = await session.create_sequences([_new_sequence(sequence) for sequence in sequences])
    except KvkeeperError as error:
        if not is_invalid(error):
            raise
        if len(sequences) == 1:
            return [error]
        return [one for sequence in sequences for one in await create_sequences(session, [sequence])]  # which of them was it?
    return [each if isinstance(each, KvkeeperError) else each.start_number for each in created]


def _new_sequence(sequence: Sequence) -> NewSequence:
    request = sequence.request
    assert sequence.sequence_id is not None
    return NewSequence(
        sequence.sequence_id,
        sequence.token_ids,
        request.max_len,
        request.tenant,
        request.priority,
        None if request.retention is None else pb.Retention(**asdict(request.retention)),
        request.start_number,
        int(request.reuse_hint),  # type: ignore[arg-type]  # the numbers are the protocol's
        request.retain_ms,
        cache_salt=request.cache_salt,
    )


def client_name(model: ServedModel, address: str) -> str:
    """The session's name, which shows people to which engine it belongs: its model, address and process."""
    return f"kvkeeper-engine {model.name[:_MAX_NAME_PART]} {address} pid {os.getpid()}"


async def open_memory(
    client: AsyncCacheClient, model: ServedModel, config: EngineConfig, address: str = "", ranks: Ranks | None = None
) -> KvMemory:
    """Open a session for the model, attach, and put the model on the memory.

    Raises KvkeeperError; where the device of a rank fails, an error for which find_fault returns a fault.

    address: of this engine. ranks: the others, where several share the model; they are started where they do not run.
    """
    if ranks is not None:
        await in_thread(_on_ranks, ranks.make_ready)
    name = client_name(model, address)
    try:
        session = await client.open_session(
            make_kv_spec(model, config.block_size),
            pb.EXECUTOR_ENGINE,
            ttl_ms=config.lease_ms,
            client_name=name,
            packs_host_blocks=True,
            takes_partial_blocks=True,
        )
    except KvkeeperError as error:
        if model.whole is None or not refuses_groups(error):
            raise
        log.info("layer_groups_refused", message=error.args[0])
        return await open_memory(client, model.whole, config, address, ranks)
    layout = model.layout(config.block_size)
    try:
        _require_device(session.pool, model.device)
        arena = await session.attach(step_lane=config.step_carrier == "auto")
        assert session.pool.block_bytes == layout.block_bytes, "both services compute a block's size alike"
        _require_index(arena, model.device)
        packing = make_packing(layout, get_host_format(session.pool))
        made = _on_arena(session, arena, model, layout, packing, ranks)
    except BaseException:
        with contextlib.suppress(KvkeeperError):
            await session.close()
        raise
    try:
        if ranks is not None:  # they pin their shares of the host tier meanwhile
            attachment = make_attachment(session, packing, has_groups=bool(model.groups))
            await _renewing(made, partial(_on_ranks, partial(ranks.attach, attachment)))
        if arena.is_on_device:
            await _renewing(made, arena.pin_hosts)  # seconds for each 10 GB
            await _renewing(made, made.transfers.make_ready)
        if model.make_ready is not None:
            limits = make_limits(session.pool, model, config)
            bounds = StepBounds(limits.num_rows, limits.max_len, limits.token_budget)
            await _renewing(made, partial(_on_ranks, partial(model.make_ready, made.runner, bounds)))
    except BaseException as error:
        clear_frames(error.__traceback__)  # what failed may view the memory, which is to be unmapped
        await made.close(is_lost=lost_by(error) is not None)
        raise
    return made


def _on_arena(
    session: AsyncCacheSession,
    arena: Arena,
    model: ServedModel,
    layout: AnyLayout,
    packing: HostBlocks | None,
    ranks: Ranks | None,
) -> KvMemory:
    """The model on the memory, which nothing else views. The other ranks have not mapped theirs yet."""
    memory, block_bytes = arena_tensor(arena), layout.block_bytes
    runner: Runner = model.make_runner(layout.view(memory), layout)
    others: RankedRunner | None = None
    if ranks is not None:
        runner = others = RankedRunner(runner, ranks)
    hosts = host_blocks(arena, session.pool.host_block_bytes or block_bytes, 0, model.num_ranks)
    transfers = TransferRunner(memory.view(-1, block_bytes), hosts, others, packing)
    return KvMemory(session, arena, transfers, runner, ranks)


def _on_ranks(work: Callable[[], None]) -> None:
    """Run the work, in a thread. Raises KvkeeperError where a rank is lost or refused."""
    try:
        work()
    except RankLost as error:
        raise rank_lost(str(error)) from None
    except RankRefused as error:
        code = grpc.StatusCode[error.fields["code"]]
        raise KvkeeperError(code, error.fields["reason"], error.fields["message"]) from None


async def _renewing(memory: KvMemory, work: Callable[[], None]) -> None:
    """Run the work in a thread, and keep the session alive meanwhile. Raises KvkeeperError where it is lost, after the work.

    What the work raises comes first: it says why there is a rank less.
    """
    working = asyncio.ensure_future(in_thread(work))
    try:
        while not working.done():
            await asyncio.wait({working}, timeout=memory.session.ttl_ms / 1000 / _RENEWALS)
            if not working.done():
                await memory.renew()
    except Exception:
        await asyncio.wait({working})
        if working.exception() is None:
            raise
    finally:
        await asyncio.wait({working})  # until then it reads the arena
    await working


def _require_index(arena: Arena, device: torch.device) -> None:
    """Raises KvkeeperError where the pool's memory is on another device than the model, by the indices of this process."""
    if not arena.is_on_device:
        return
    index = arena.device_bytes().device
    if index != (device.index or 0):
        arena.close()
        message = f"its pools are on another CUDA device: start this engine with --device cuda:{index}"
        raise KvkeeperError(grpc.StatusCode.FAILED_PRECONDITION, message=message)


def _require_device(pool: pb.PoolInfo, device: torch.device) -> None:
    """Raises KvkeeperError where the pool's memory has another kind than the model computes on."""
    is_cuda = pool.arena_kind in (pb.ARENA_KIND_CUDA_IPC, pb.ARENA_KIND_CUDA_VMM)
    if is_cuda != (device.type == "cuda"):
        where, flag = ("CUDA memory", "cuda") if is_cuda else ("the host's memory", "cpu")
        raise KvkeeperError(
            grpc.StatusCode.FAILED_PRECONDITION, message=f"its pools are in {where}: start this engine with --device {flag}"
        )
