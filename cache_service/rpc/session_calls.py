"""CacheService but for its hot path and for inspection_calls.py: sessions and one-item calls, thin wrappers over the core.

One method per RPC, in the proto's order; each takes a parsed request and gives the response, and raises CacheError. A
one-item call counts as a step whose device work is complete at once: its copies are run here before the answer, so it
belongs to sessions whose copies the cache service executes.
"""

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.service import VERSION
from kvkeeper.service.door import MAX_MESSAGE_BYTES, MAX_PROMPT_MESSAGE_BYTES

from ..config import CacheConfig
from ..core.manager import PoolManager
from ..core.values.errors import InvalidField, UnknownSession, WrongMode
from ..core.values.types import Copies, Executor, SequenceId, SequenceView, SessionId
from ..runtime.lease import SessionMode
from ..runtime.session_manager import DEFAULT_TTL, MAX_TTL, MAX_UNATTACHED_TTL, MIN_TTL, LiveSession, SessionManager
from ..unimplemented import UNIMPLEMENTED_METHODS
from . import kv_calls as kv_io
from .convert import kv_spec
from .convert import pagination as paging
from .convert import sequences as convert
from .inspection_calls import Questions
from .prefix_calls import PrefixService

_DEFAULT_PAGE, _MAX_PAGE = 100, 1000


class _OfSession(Protocol):
    """A request that names its session."""

    session_id: str
    epoch: int


class CacheService(Questions, PrefixService):
    """See the module. attach_path is where OpenSession sends processes that want to map the arena."""

    def __init__(
        self, config: CacheConfig, session_manager: SessionManager, attach_path: str, time: Callable[[], float]
    ) -> None:
        """time: monotone seconds that also pass while the service is held up, for what it tells of itself."""
        super().__init__(session_manager)
        self._config = config
        self._attach_path = attach_path
        self._time = time
        self._started = time()

    async def get_capabilities(self, _: pb.GetCapabilitiesRequest) -> pb.GetCapabilitiesResponse:
        return pb.GetCapabilitiesResponse(
            version=VERSION,
            epoch=self._session_manager.epoch,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_prompt_message_bytes=MAX_PROMPT_MESSAGE_BYTES,
            min_ttl_ms=_ms(MIN_TTL),
            max_ttl_ms=_ms(MAX_TTL),
            max_unattached_ttl_ms=_ms(MAX_UNATTACHED_TTL),
            max_sequences=self._config.max_sequences,
            max_tokens_per_sequence=self._config.most_tokens,
            unimplemented_methods=sorted(UNIMPLEMENTED_METHODS),
            pools=[pool.info for pool in self._session_manager.registry.pools],
            max_sessions=self._config.max_sessions,
            logits_memory_bytes=self._config.logits_memory,
        )

    async def check_admission(self, request: pb.CheckAdmissionRequest) -> pb.CheckAdmissionResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        tokens = convert.token_ids(request.token_ids) if request.token_ids else None
        if tokens is None:
            convert.check_range("num_prompt_tokens", request.num_prompt_tokens, 1, 2**31 - 1)
        convert.check_range("num_new_tokens", request.num_new_tokens, 0, 2**31 - 1)
        answer = live.pool.manager.check_admission(
            convert.tenant(request.tenant),
            tokens,
            request.num_prompt_tokens,
            request.num_new_tokens,
            convert.retention(request),
        )
        verdict = pb.ADMISSION_VERDICT_NOW if answer.can_now else pb.ADMISSION_VERDICT_LATER
        return pb.CheckAdmissionResponse(
            verdict=verdict if answer.can_ever else pb.ADMISSION_VERDICT_NEVER,
            num_hit_tokens=answer.num_hit_tokens,
            num_required_blocks=answer.num_required_blocks,
            num_available_blocks=answer.num_available_blocks,
            limit_tokens=answer.limit_tokens,
        )

    async def open_session(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        ttl_ms = request.ttl_ms or _ms(DEFAULT_TTL)
        convert.check_range("ttl_ms", ttl_ms, _ms(MIN_TTL), _ms(MAX_UNATTACHED_TTL))
        convert.check_text("client_name", request.client_name, 256)
        if request.executor not in convert.EXECUTORS:
            raise InvalidField("an executor of Executor is wanted", field="executor")
        spec = kv_spec.checked_spec(request.spec)
        live = await self._session_manager.open(spec, convert.EXECUTORS[request.executor], ttl_ms / 1000, request.client_name)
        return pb.OpenSessionResponse(
            session_id=live.core.id,
            epoch=live.core.epoch,
            ttl_ms=ttl_ms,
            pool=live.pool.info,
            attach_token=live.attach_token,
            attach_socket_path=self._attach_path,
        )

    async def renew_session(self, request: pb.RenewSessionRequest) -> pb.RenewSessionResponse:
        report = convert.transfer_report(request)
        live = self._session_manager.require(request.session_id, request.epoch, published=False)
        live.core.check_complete(request.completed_step_id)
        if request.completed_step_id or len(report[0]) or len(report[1]):
            live.pool.manager.complete(live.core.id, request.completed_step_id, *report)
            live.core.complete(request.completed_step_id)
            live.pool.publish_soon()  # what waited for a copy
        return pb.RenewSessionResponse(
            ttl_ms=_ms(live.core.ttl),
            expected_step_id=live.core.step_id + 1,
            num_give_back_blocks=live.pool.manager.num_give_back(live.core.id),
        )

    async def close_session(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        result = self._session_manager.close(request.session_id, request.epoch, drained=request.drained)
        return pb.CloseSessionResponse(
            num_released_sequences=result.num_released_sequences, num_quarantined_blocks=result.num_quarantined_blocks
        )

    async def create_sequence(self, request: pb.CreateSequenceRequest) -> pb.CreateSequenceResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        args = convert.sequence_args(request)
        num_matched = live.pool.manager.create_sequence(live.core.id, args)
        start_number = live.pool.manager.start_number(live.core.id, args.sequence_id)
        return pb.CreateSequenceResponse(num_matched_tokens=num_matched, start_number=start_number)

    async def extend_sequence(self, request: pb.ExtendSequenceRequest) -> pb.ExtendSequenceResponse:
        convert.check_range("num_tokens", request.num_tokens, 1, 2**31 - 1)
        await self._copies_done(request)
        with self._one_item(request) as live:
            sequence_id = convert.sequence_id(request.sequence_id)
            look_up = not request.skip_look_up
            copies = live.pool.manager.extend(live.core.id, sequence_id, request.num_tokens, look_up=look_up)
        copying = live.pool.copy(copies)
        if copying is not None:
            await copying
        return pb.ExtendSequenceResponse(sequence=_shown(live, sequence_id))

    async def commit_sequence(self, request: pb.CommitSequenceRequest) -> pb.CommitSequenceResponse:
        tokens = convert.token_ids(request.token_ids, at_least=0)
        convert.check_range("num_tokens", request.num_tokens, 0, 2**31 - 1)
        with self._one_item(request) as live:
            sequence_id = convert.sequence_id(request.sequence_id)
            live.pool.manager.commit(live.core.id, sequence_id, request.num_tokens, request.first_token_idx, tokens)
        return pb.CommitSequenceResponse(sequence=_shown(live, sequence_id))

    async def fork_sequence(self, request: pb.ForkSequenceRequest) -> pb.ForkSequenceResponse:
        with self._one_item(request) as live:
            child_id = convert.sequence_id(request.child_id, "child_id")
            parent_id = convert.sequence_id(request.parent_id, "parent_id")
            live.pool.manager.fork(live.core.id, parent_id, child_id, request.num_tokens)
        return pb.ForkSequenceResponse(sequence=_shown(live, child_id))

    async def truncate_sequence(self, request: pb.TruncateSequenceRequest) -> pb.TruncateSequenceResponse:
        with self._one_item(request) as live:
            sequence_id = convert.sequence_id(request.sequence_id)
            live.pool.manager.truncate(live.core.id, sequence_id, request.num_tokens)
        return pb.TruncateSequenceResponse(sequence=_shown(live, sequence_id))

    async def update_sequence(self, request: pb.UpdateSequenceRequest) -> pb.UpdateSequenceResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        sequence_id = convert.sequence_id(request.sequence_id)
        priority = request.priority if request.HasField("priority") else None
        retention = convert.retention(request)
        live.pool.manager.update_sequence(live.core.id, sequence_id, priority=priority, retention=retention)
        return pb.UpdateSequenceResponse(sequence=_shown(live, sequence_id))

    async def release_sequence(self, request: pb.ReleaseSequenceRequest) -> pb.ReleaseSequenceResponse:
        with self._one_item(request) as live:
            num_dropped = live.pool.manager.release(live.core.id, convert.sequence_id(request.sequence_id))
        return pb.ReleaseSequenceResponse(num_dropped_blocks=num_dropped)

    async def swap_out_sequence(self, request: pb.SwapOutSequenceRequest) -> pb.SwapOutSequenceResponse:
        return pb.SwapOutSequenceResponse(sequence=await self._swap(request, PoolManager.swap_out))

    async def swap_in_sequence(self, request: pb.SwapInSequenceRequest) -> pb.SwapInSequenceResponse:
        return pb.SwapInSequenceResponse(sequence=await self._swap(request, PoolManager.swap_in))

    async def get_sequence(self, request: pb.GetSequenceRequest) -> pb.GetSequenceResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        sequence_id = convert.sequence_id(request.sequence_id)
        view = live.pool.manager.view(live.core.id, sequence_id)
        if not request.include_tokens:
            return pb.GetSequenceResponse(sequence=convert.sequence_info(view))
        tokens = live.pool.manager.tokens(live.core.id, sequence_id)
        return pb.GetSequenceResponse(sequence=convert.sequence_info(view, tokens=tokens))

    async def list_sequences(self, request: pb.ListSequencesRequest) -> pb.ListSequencesResponse:
        convert.check_range("page_size", request.page_size, 0, _MAX_PAGE)
        size = request.page_size or _DEFAULT_PAGE
        views, next_page_token = paging.page(self._views(request.session_id), size, request.page_token)
        rows = [convert.sequence_info(view, with_table=False) for view in views]
        return pb.ListSequencesResponse(sequences=rows, next_page_token=next_page_token)

    async def select_victims(self, request: pb.SelectVictimsRequest) -> pb.SelectVictimsResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        convert.check_one_target(request)
        policy = convert.victim_policy(request.policy)
        share = request.max_utilization if request.HasField("max_utilization") else None
        victims = live.pool.manager.select_victims(live.core.id, policy, request.num_blocks, share)
        ids = live.pool.manager.state.sequences.ids[victims.slots].tolist() if victims.slots else []
        return pb.SelectVictimsResponse(sequence_ids=ids, num_freed_blocks=victims.num_freed)

    async def collect_garbage(self, request: pb.CollectGarbageRequest) -> pb.CollectGarbageResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        return pb.CollectGarbageResponse(**live.pool.manager.collect_garbage(live.core.id)._asdict())

    async def match_prefix(self, request: pb.MatchPrefixRequest) -> pb.MatchPrefixResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        blocks = live.pool.manager.match_prefix(convert.tenant(request.tenant), convert.token_ids(request.token_ids))
        return pb.MatchPrefixResponse(
            num_matched_tokens=len(blocks) * live.pool.info.block_size, block_ids=blocks[blocks > 0].tolist()
        )

    async def clear_prefix_cache(self, request: pb.ClearPrefixCacheRequest) -> pb.ClearPrefixCacheResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        result = live.pool.manager.clear_prefix_cache()
        live.pool.publish_soon()  # what runs is published anew
        return pb.ClearPrefixCacheResponse(
            num_freed_blocks=result.num_freed_blocks, num_forgotten_blocks=result.num_forgotten_blocks
        )

    async def evict_blocks(self, request: pb.EvictBlocksRequest) -> pb.EvictBlocksResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        convert.check_one_target(request)
        await self._copies_done(request)
        manager = live.pool.manager
        with manager.demoting(live.core.id) as moved:
            if request.HasField("max_utilization"):
                num_evicted = manager.evict_to(request.max_utilization)
            elif request.num_blocks:
                num_evicted = manager.evict_count(request.num_blocks)
            else:
                num_evicted = manager.evict_blocks(request.num_free_blocks)
        copying = live.pool.copy(moved.copies)
        if copying is not None:
            await copying
        num_free = live.pool.manager.stats().num_free_blocks
        return pb.EvictBlocksResponse(
            num_evicted_blocks=num_evicted, num_free_blocks=num_free, num_demoted_blocks=moved.num_blocks
        )

    async def get_stats(self, _: pb.GetStatsRequest) -> pb.GetStatsResponse:
        now = self._session_manager.now()
        pools, sessions = self._session_manager.registry.pools, self._session_manager.sessions
        return pb.GetStatsResponse(
            epoch=self._session_manager.epoch,
            uptime_seconds=self._time() - self._started,
            pools=[pool.stats() for pool in pools],
            sessions=[convert.session_info(live.core, now, _num_sequences(live), int(live.is_mapped)) for live in sessions],
            num_opened_sessions=self._session_manager.num_opened,
            num_reaped_sessions=self._session_manager.num_reaped,
            num_replaced_pools=self._session_manager.registry.num_replaced,
        )

    async def read_kv(self, request: pb.ReadKvRequest) -> AsyncIterator[pb.ReadKvResponse]:
        live = self._session_manager.require(request.session_id, request.epoch)
        sequence_id = convert.sequence_id(request.sequence_id)
        num_layers = live.pool.info.spec.num_layers
        if len(request.layer_idx) > num_layers:
            raise InvalidField("each layer is read once", field="layer_idx", limit=num_layers)
        for layer_idx in request.layer_idx:
            convert.check_range("layer_idx", layer_idx, 0, num_layers - 1)
        readable = live.pool.manager.readable(live.core.id, sequence_id)
        committed, first = readable.view.num_committed_tokens, request.first_token_idx
        convert.check_range("first_token_idx", first, 0, committed)
        convert.check_range("num_tokens", request.num_tokens, 0, committed - first)
        count = request.num_tokens or max(readable.num_tokens - first, 0)
        kv_io.check_bounds(readable, first, count)
        live.pool.manager.note_read(live.core.id, sequence_id)
        for layer_idx in request.layer_idx or range(num_layers):
            for token_idx, num_tokens in kv_io.chunks(live.pool, first, count):
                await self._copies_done(request)  # one of them may fill the block that is read
                readable = live.pool.manager.readable(live.core.id, sequence_id)
                key, value = kv_io.read(live.pool, readable, layer_idx, token_idx, num_tokens)
                yield pb.ReadKvResponse(
                    layer_idx=layer_idx, first_token_idx=token_idx, num_tokens=num_tokens, key=key, value=value
                )

    async def write_kv(self, requests: AsyncIterator[pb.WriteKvRequest]) -> pb.WriteKvResponse:
        num_chunks = num_bytes = 0
        async for request in requests:
            sequence_id, key, value = convert.sequence_id(request.sequence_id), request.key, request.value
            await self._copies_done(request)  # one of them may overwrite the block that is written
            with self._one_item(request) as live:
                kv_io.write(live.pool, live.core.id, sequence_id, request.layer_idx, request.first_token_idx, key, value)
            num_chunks += 1
            num_bytes += len(key) + len(value)
        return pb.WriteKvResponse(num_chunks=num_chunks, num_bytes=num_bytes)

    async def check_invariants(self, _: pb.CheckInvariantsRequest) -> pb.CheckInvariantsResponse:
        response = pb.CheckInvariantsResponse()
        for pool in self._session_manager.registry.pools:
            response.violations.extend(pool.manager.check_invariants())
            response.num_checked_blocks += pool.info.num_blocks
            response.num_checked_sequences += sum(1 for _ in pool.manager.views(None))
        return response

    @contextlib.contextmanager
    def _one_item(self, request: _OfSession) -> Iterator[LiveSession]:
        """The session of a one-item call. The first such call that succeeds fixes the session's mode. Raises WrongMode."""
        live = self._session_manager.require(request.session_id, request.epoch)
        if live.core.executor is Executor.ENGINE:
            raise WrongMode("an engine that executes its copies steps: a one-item call cannot hand it any", mode="steps")
        mode = live.core.mode
        live.core.use_mode(SessionMode.ONE_ITEM)
        try:
            yield live
        except Exception:
            live.core.mode = mode
            raise
        live.pool.publish_soon()

    async def _swap(
        self,
        request: pb.SwapOutSequenceRequest | pb.SwapInSequenceRequest,
        swap: Callable[[PoolManager, SessionId, int], Copies],
    ) -> pb.SequenceInfo:
        await self._copies_done(request)
        with self._one_item(request) as live:
            sequence_id = convert.sequence_id(request.sequence_id)
            copies = swap(live.pool.manager, live.core.id, sequence_id)
        copying = live.pool.copy(copies)
        if copying is not None:
            await copying
        return _shown(live, sequence_id)

    async def _copies_done(self, request: _OfSession) -> None:
        """Waits until no large copy runs in the session's pool; see Pool.copy."""
        while (copying := self._session_manager.require(request.session_id, request.epoch).pool.copying) is not None:
            await asyncio.shield(copying)

    def _views(self, session_id: str) -> Iterator[SequenceView]:
        """Of one session or of all, ordered by (session, sequence)."""
        if session_id:
            live = next((live for live in self._session_manager.sessions if live.core.id == session_id), None)
            if live is None:
                raise UnknownSession("no live session has this id")
            return live.pool.manager.views(SessionId(session_id))
        return heapq.merge(*(pool.manager.views(None) for pool in self._session_manager.registry.pools), key=paging.position)


def _shown(live: LiveSession, sequence_id: SequenceId) -> pb.SequenceInfo:
    return convert.sequence_info(live.pool.manager.view(live.core.id, sequence_id))


def _num_sequences(live: LiveSession) -> int:
    return sum(1 for _ in live.pool.manager.views(live.core.id))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
