"""Calls on cached prefixes: look-up, explanation of a match, pins, hints, stored logits, and clearing the prefix cache."""

import asyncio
import secrets

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.blocks.pins import MAX_PIN_TTL
from ..core.values.types import Int32Array, ReuseHint
from ..runtime.session_manager import SessionManager
from ..runtime.turns import Turns
from .convert import checks, sequences
from .convert.checks import check_range
from .convert.reports import explanation
from .ownership import check_sequence, own_session, readable_session, require_all_tenants

_SLICE_BLOCKS = 128  # forgotten in less than a millisecond
_MOST_HINTS = 256  # of a call
_TIER_SECONDS = 5.0  # that a clearing waits for a lower tier to have it written down


class PrefixCalls:
    """A prefix is named by scope and tokens, or by a sequence that has it."""

    def __init__(self, session_manager: SessionManager) -> None:
        self._session_manager = session_manager

    async def match_prefix(self, request: pb.MatchPrefixRequest) -> pb.MatchPrefixResponse:
        live = readable_session(self._session_manager, request)
        found = live.pool.manager.queries.match_prefix(checks.scope(request), sequences.token_ids(request.token_ids))
        return pb.MatchPrefixResponse(
            num_matched_tokens=found.num_tokens,
            block_ids=found.blocks[found.blocks > 0].tolist(),
            num_host_tokens=found.num_host,
            num_disk_tokens=found.behind.num_disk,
            num_remote_tokens=found.behind.num_remote,
            remote_not_asked=found.behind.remote_not_asked,
        )

    async def explain_match(self, request: pb.ExplainMatchRequest) -> pb.ExplainMatchResponse:
        live = readable_session(self._session_manager, request)
        scope, tokens = checks.scope(request), sequences.token_ids(request.token_ids)
        return explanation(live.pool.manager.queries.explain_match(scope, tokens), live.pool.info.host_kv_dtype)

    async def pin_prefix(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        live = own_session(self._session_manager, request)
        check_range("ttl_ms", request.ttl_ms, 1, round(MAX_PIN_TTL * 1000))
        scope, tokens = checks.scope(request), sequences.token_ids(request.token_ids)
        ttl = request.ttl_ms / 1000
        result = live.pool.manager.prefixes.pin(live.core.id, secrets.token_hex(16), scope, tokens, ttl)
        return pb.PinPrefixResponse(pin_id=result.pin_id, num_pinned_tokens=result.num_tokens)

    async def unpin_prefix(self, request: pb.UnpinPrefixRequest) -> pb.UnpinPrefixResponse:
        live = own_session(self._session_manager, request)
        live.pool.manager.prefixes.unpin(live.core.id, request.pin_id)
        return pb.UnpinPrefixResponse()

    async def hint_prefix(self, request: pb.HintPrefixRequest) -> pb.HintPrefixResponse:
        live = own_session(self._session_manager, request)
        check_range("hints", len(request.hints), 1, _MOST_HINTS)
        hints = [_parse_hint(hint) for hint in request.hints]
        note = live.pool.manager.prefixes.hint
        num_tokens = [
            note(live.core.id, *each, prefetch=hint.prefetch) for each, hint in zip(hints, request.hints, strict=True)
        ]
        return pb.HintPrefixResponse(num_hinted_tokens=num_tokens)

    async def store_logits(self, request: pb.StoreLogitsRequest) -> pb.StoreLogitsResponse:
        live = own_session(self._session_manager, request)
        sequence_id = checks.sequence_id(request.sequence_id)
        live.pool.manager.prefixes.store_logits(live.core.id, sequence_id, request.num_tokens, request.logits)
        return pb.StoreLogitsResponse()

    async def read_logits(self, request: pb.ReadLogitsRequest) -> pb.ReadLogitsResponse:
        live = readable_session(self._session_manager, request)
        sequence_id = checks.sequence_id(request.sequence_id)
        check_sequence(live, sequence_id)
        return pb.ReadLogitsResponse(logits=live.pool.manager.prefixes.read_logits(live.core.id, sequence_id))

    async def clear_prefix_cache(self, request: pb.ClearPrefixCacheRequest) -> pb.ClearPrefixCacheResponse:
        require_all_tenants()
        live = own_session(self._session_manager, request)
        clearing, turns = live.pool.manager.prefixes.begin_clearing(), Turns()
        try:
            while clearing.clear_some(_SLICE_BLOCKS):
                await turns.offer()
        finally:  # also where the call is cancelled
            result = clearing.end()
            live.pool.publish_soon()
        tiers = [tier for tier in (live.pool.disk, live.pool.remote) if tier is not None]
        await asyncio.gather(*(tier.cleared(_TIER_SECONDS) for tier in tiers))
        return pb.ClearPrefixCacheResponse(
            num_freed_blocks=result.num_freed_blocks, num_forgotten_blocks=result.num_forgotten_blocks
        )


def _parse_hint(hint: pb.PrefixHint) -> tuple[str, Int32Array, ReuseHint, float]:
    """Scope, tokens, what is known, and the seconds that it is retained. Raises InvalidField, TenantNotAllowed."""
    scope, tokens = checks.scope(hint), sequences.token_ids(hint.token_ids)
    return scope, tokens, sequences.reuse_hint(hint), sequences.retain_seconds(hint)
