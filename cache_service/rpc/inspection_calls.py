"""Calls that look at the service and change nothing: statistics, invariants, single blocks, events."""

from collections.abc import AsyncIterator, Callable

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.common.service.output import num_dropped_lines
from kvkeeper.common.trust.caller import calling

from ..core.values.errors import Draining
from ..runtime.session_manager import SessionManager
from ..runtime.turns import Turns
from .convert import checks, reports
from .convert.checks import MAX_INT32, check_range
from .ownership import readable_session, require_all_tenants
from .watch_streams import WatchStreams


class InspectionCalls:
    """The service's uptime counts from the making of this object."""

    def __init__(self, session_manager: SessionManager, watch_streams: WatchStreams, time: Callable[[], float]) -> None:
        """time: monotone seconds that also pass while the service is held up."""
        self._session_manager = session_manager
        self._watch_streams = watch_streams
        self._time = time
        self._started = time()

    async def get_stats(self, _: pb.GetStatsRequest) -> pb.GetStatsResponse:
        session_manager, own = self._session_manager, calling()
        for pool in session_manager.registry.pools:
            await pool.published()
        now = session_manager.clock.time()
        return pb.GetStatsResponse(
            epoch=session_manager.epoch,
            uptime_seconds=self._time() - self._started,
            pools=[reports.pool_stats(pool, names_tenants=own.is_for_all) for pool in session_manager.registry.pools],
            sessions=[
                reports.session_info(
                    live.core,
                    now,
                    live.pool.manager.queries.num_sequences(live.core.id),
                    len(live.mapped),
                    None if live.stream is None else live.stream.kind,
                )
                for live in session_manager.sessions
                if own.owns(live.tenant)
            ],
            num_opened_sessions=session_manager.num_opened,
            num_reaped_sessions=session_manager.num_reaped,
            num_replaced_pools=session_manager.registry.num_replaced,
            num_dropped_log_lines=num_dropped_lines(),
        )

    async def check_invariants(self, _: pb.CheckInvariantsRequest) -> pb.CheckInvariantsResponse:
        require_all_tenants()
        response, turns = pb.CheckInvariantsResponse(), Turns()
        for pool in self._session_manager.registry.pools:
            for wrong in pool.manager.queries.audit():
                response.violations.extend(wrong)
                await turns.offer()
            response.num_checked_blocks += pool.info.num_blocks
            response.num_checked_sequences += pool.manager.queries.num_sequences(None)
        return response

    async def get_block(self, request: pb.GetBlockRequest) -> pb.GetBlockResponse:
        require_all_tenants()
        live = readable_session(self._session_manager, request)
        check_range("block_id", request.block_id, 1, MAX_INT32)
        return reports.block_info(live.pool.manager.queries.block_view(request.block_id))

    def watch_events(self, request: pb.WatchEventsRequest) -> AsyncIterator[pb.WatchEventsResponse]:
        live = readable_session(self._session_manager, request)
        if self._session_manager.is_draining:
            raise Draining("the service is stopping")
        return self._watch_streams.watch(live, checks.scope(request), wants_tokens=request.include_token_ids)
