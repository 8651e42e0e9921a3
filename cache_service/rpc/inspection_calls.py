"""Calls of CacheService that look closely at one pool and change nothing of it: explanations, single blocks, events.

One method per RPC, in the proto's order, as in session_calls.py; CacheService is made of both.
"""

from collections.abc import AsyncIterator

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.values.errors import Draining
from ..runtime.session_manager import SessionManager
from .convert import sequences as convert
from .watch_streams import WatchDesk


class Questions:
    """See the module."""

    def __init__(self, session_manager: SessionManager) -> None:
        self._session_manager = session_manager
        self._watches = WatchDesk()
        session_manager.registry.on_replaced = self._watches.tell_replaced

    async def get_block(self, request: pb.GetBlockRequest) -> pb.GetBlockResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        convert.check_range("block_id", request.block_id, 1, 2**31 - 1)
        return convert.block_info(live.pool.manager.block_view(request.block_id))

    async def explain_match(self, request: pb.ExplainMatchRequest) -> pb.ExplainMatchResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        tenant, tokens = convert.tenant(request.tenant), convert.token_ids(request.token_ids)
        return convert.explanation(live.pool.manager.explain_match(tenant, tokens))

    def watch_events(self, request: pb.WatchEventsRequest) -> AsyncIterator[pb.WatchEventsResponse]:
        live = self._session_manager.require(request.session_id, request.epoch)
        if self._session_manager.is_draining:
            raise Draining("the service is stopping")
        return self._watches.watch(live, convert.tenant(request.tenant))
