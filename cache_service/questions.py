"""Calls of CacheService that look closely at one pool and change nothing of it: explanations, single blocks, events.

One method per RPC, in the proto's order, as in service.py; CacheService is made of both.
"""

from cache_service import convert
from cache_service.keeper import Keeper
from kvkeeper.cache.v1 import cache_service_pb2 as pb


class Questions:
    """See the module."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def get_block(self, request: pb.GetBlockRequest) -> pb.GetBlockResponse:
        live = self._keeper.require(request.session_id, request.epoch)
        convert.check_range("block_id", request.block_id, 1, 2**31 - 1)
        return convert.block_info(live.pool.manager.block_view(request.block_id))

    async def explain_match(self, request: pb.ExplainMatchRequest) -> pb.ExplainMatchResponse:
        live = self._keeper.require(request.session_id, request.epoch)
        tenant, tokens = convert.tenant(request.tenant), convert.token_ids(request.token_ids)
        return convert.explanation(live.pool.manager.explain_match(tenant, tokens))
