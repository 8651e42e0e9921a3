"""The part of CacheService that keeps prefixes: pins and stored logits.

Like session_calls.py: one method per RPC, in the proto's order, each a thin wrapper over the core.
"""

import secrets

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.blocks.pins import MAX_PIN_TTL
from ..runtime.session_manager import SessionManager
from .convert import sequences as convert


class PrefixService:
    """See the module."""

    _session_manager: SessionManager

    async def pin_prefix(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        convert.check_range("ttl_ms", request.ttl_ms, 1, round(MAX_PIN_TTL * 1000))
        tenant, tokens = convert.tenant(request.tenant), convert.token_ids(request.token_ids)
        ttl = request.ttl_ms / 1000
        result = live.pool.manager.pin_prefix(live.core.id, secrets.token_hex(16), tenant, tokens, ttl)
        return pb.PinPrefixResponse(pin_id=result.pin_id, num_pinned_tokens=result.num_tokens)

    async def unpin_prefix(self, request: pb.UnpinPrefixRequest) -> pb.UnpinPrefixResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        live.pool.manager.unpin_prefix(live.core.id, request.pin_id)
        return pb.UnpinPrefixResponse()

    async def store_logits(self, request: pb.StoreLogitsRequest) -> pb.StoreLogitsResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        sequence_id = convert.sequence_id(request.sequence_id)
        live.pool.manager.store_logits(live.core.id, sequence_id, request.num_tokens, request.logits)
        return pb.StoreLogitsResponse()

    async def read_logits(self, request: pb.ReadLogitsRequest) -> pb.ReadLogitsResponse:
        live = self._session_manager.require(request.session_id, request.epoch)
        sequence_id = convert.sequence_id(request.sequence_id)
        return pb.ReadLogitsResponse(logits=live.pool.manager.read_logits(live.core.id, sequence_id))
