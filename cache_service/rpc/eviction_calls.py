"""Calls about room in a pool: whether a prompt fits, which sequences to preempt, what to evict and collect."""

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.manager import PoolManager
from ..core.values.types import SessionId
from ..runtime.session_manager import SessionManager
from ..runtime.turns import Turns
from .convert import checks, sequences
from .convert.checks import MAX_INT32, check_range
from .one_item_session import OneItemSessions, run_copies
from .ownership import own_session, readable_session, require_all_tenants

_SLICE_BLOCKS = 128  # evicted in less than a millisecond


class EvictionCalls:
    """An evicted block may be copied to the host tier first, so EvictBlocks waits for copies as a one-item call does."""

    def __init__(self, session_manager: SessionManager, one_item: OneItemSessions) -> None:
        self._session_manager = session_manager
        self._one_item = one_item

    async def check_admission(self, request: pb.CheckAdmissionRequest) -> pb.CheckAdmissionResponse:
        live = readable_session(self._session_manager, request)
        tokens = sequences.token_ids(request.token_ids) if request.token_ids else None
        if tokens is None:
            check_range("num_prompt_tokens", request.num_prompt_tokens, 1, MAX_INT32)
        check_range("num_new_tokens", request.num_new_tokens, 0, MAX_INT32)
        answer = live.pool.manager.admission.check(
            checks.scope(request),
            tokens,
            request.num_prompt_tokens,
            request.num_new_tokens,
            sequences.retention(request),
            live.core.id,
        )
        verdict = pb.ADMISSION_VERDICT_NOW if answer.can_now else pb.ADMISSION_VERDICT_LATER
        return pb.CheckAdmissionResponse(
            verdict=verdict if answer.can_ever else pb.ADMISSION_VERDICT_NEVER,
            num_hit_tokens=answer.num_hit_tokens,
            num_required_blocks=answer.num_required_blocks,
            num_available_blocks=answer.num_available_blocks,
            limit_tokens=answer.limit_tokens,
        )

    async def select_victims(self, request: pb.SelectVictimsRequest) -> pb.SelectVictimsResponse:
        live = own_session(self._session_manager, request)
        checks.check_one_target(request)
        policy = checks.victim_policy(request.policy)
        share = request.max_utilization if request.HasField("max_utilization") else None
        victims = live.pool.manager.victims.select(live.core.id, policy, request.num_blocks, share)
        ids = live.pool.manager.state.sequences.ids[victims.slots].tolist() if victims.slots else []
        return pb.SelectVictimsResponse(sequence_ids=ids, num_freed_blocks=victims.num_freed)

    async def collect_garbage(self, request: pb.CollectGarbageRequest) -> pb.CollectGarbageResponse:
        require_all_tenants()
        live = own_session(self._session_manager, request)
        return pb.CollectGarbageResponse(**live.pool.manager.garbage.collect(live.core.id)._asdict())

    async def evict_blocks(self, request: pb.EvictBlocksRequest) -> pb.EvictBlocksResponse:
        """In slices, each with the copies of what it demotes; at most as many blocks as could be evicted at the beginning."""
        require_all_tenants()
        pool = own_session(self._session_manager, request).pool
        checks.check_one_target(request)
        num_left, num_evicted, num_demoted = pool.manager.queries.stats().num_cached_blocks, 0, 0
        turns = Turns()
        while True:
            await self._one_item.wait_for_copies(request)
            manager = pool.manager
            with manager.evictions.demoting(SessionId(request.session_id)) as moved:
                count = _evict(manager, request, num_evicted, at_most=min(num_left, _SLICE_BLOCKS))
            await run_copies(pool, moved.copies)
            num_left, num_evicted, num_demoted = num_left - count, num_evicted + count, num_demoted + moved.num_blocks
            if count < _SLICE_BLOCKS:
                break
            await turns.offer()
        return pb.EvictBlocksResponse(
            num_evicted_blocks=num_evicted,
            num_free_blocks=pool.manager.queries.stats().num_free_blocks,
            num_demoted_blocks=num_demoted,
        )


def _evict(manager: PoolManager, request: pb.EvictBlocksRequest, num_evicted: int, at_most: int) -> int:
    """A slice towards the request's target, after num_evicted of it."""
    if request.HasField("max_utilization"):
        return manager.evictions.evict_to(request.max_utilization, at_most)
    if request.num_blocks:
        return manager.evictions.evict_count(min(request.num_blocks - num_evicted, at_most))
    return manager.evictions.evict_blocks(request.num_free_blocks, at_most)
