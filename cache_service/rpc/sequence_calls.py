"""Calls on sequences: the one-item calls that change one, and the calls that show them."""

import secrets
from collections.abc import Callable
from contextlib import suppress

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.common.trust.caller import ANY_TENANT, calling

from ..core.step.one_item import OneItemCalls
from ..core.values.copies import Copies
from ..core.values.errors import InvalidField, UnknownSequence, UnknownSession
from ..core.values.types import SequenceId, SessionId
from ..runtime.live_session import LiveSession
from ..runtime.session_manager import SessionManager
from ..runtime.turns import Turns
from .convert import checks, pagination, sequences
from .convert.checks import MAX_INT32, check_range
from .one_item_session import OneItemSessions, run_copies
from .ownership import check_sequence, own_session, readable_session, require_all_tenants

_OFFER_BYTES = 16
_DEFAULT_PAGE, _MAX_PAGE = 100, 1000


class SequenceCalls:
    """One sequence at a time; the engine's way to change many at once is Step."""

    def __init__(self, session_manager: SessionManager, one_item: OneItemSessions) -> None:
        self._session_manager = session_manager
        self._one_item = one_item

    async def extend_sequence(self, request: pb.ExtendSequenceRequest) -> pb.ExtendSequenceResponse:
        check_range("num_tokens", request.num_tokens, 1, MAX_INT32)
        await self._one_item.wait_for_copies(request)
        with self._one_item.session(request) as live:
            sequence_id = checks.sequence_id(request.sequence_id)
            look_up = not request.skip_look_up
            copies = live.pool.manager.one_item.extend(live.core.id, sequence_id, request.num_tokens, look_up=look_up)
        await run_copies(live.pool, copies)
        return pb.ExtendSequenceResponse(sequence=_shown(live, sequence_id))

    async def commit_sequence(self, request: pb.CommitSequenceRequest) -> pb.CommitSequenceResponse:
        tokens = sequences.token_ids(request.token_ids, at_least=0)
        check_range("num_tokens", request.num_tokens, 0, MAX_INT32)
        with self._one_item.session(request) as live:
            sequence_id = checks.sequence_id(request.sequence_id)
            live.pool.manager.one_item.commit(live.core.id, sequence_id, request.num_tokens, request.first_token_idx, tokens)
        return pb.CommitSequenceResponse(sequence=_shown(live, sequence_id))

    async def fork_sequence(self, request: pb.ForkSequenceRequest) -> pb.ForkSequenceResponse:
        with self._one_item.session(request) as live:
            child_id = checks.sequence_id(request.child_id, "child_id")
            parent_id = checks.sequence_id(request.parent_id, "parent_id")
            live.pool.manager.one_item.fork(live.core.id, parent_id, child_id, request.num_tokens)
        return pb.ForkSequenceResponse(sequence=_shown(live, child_id))

    async def truncate_sequence(self, request: pb.TruncateSequenceRequest) -> pb.TruncateSequenceResponse:
        with self._one_item.session(request) as live:
            sequence_id = checks.sequence_id(request.sequence_id)
            live.pool.manager.one_item.truncate(live.core.id, sequence_id, request.num_tokens)
        return pb.TruncateSequenceResponse(sequence=_shown(live, sequence_id))

    async def update_sequence(self, request: pb.UpdateSequenceRequest) -> pb.UpdateSequenceResponse:
        live = own_session(self._session_manager, request)
        sequence_id = checks.sequence_id(request.sequence_id)
        priority = request.priority if request.HasField("priority") else None
        retention = sequences.retention(request)
        hint = sequences.reuse_hint(request) if request.HasField("reuse_hint") else None
        live.pool.manager.updates.update(live.core.id, sequence_id, priority=priority, retention=retention, reuse_hint=hint)
        return pb.UpdateSequenceResponse(sequence=_shown(live, sequence_id))

    async def release_sequence(self, request: pb.ReleaseSequenceRequest) -> pb.ReleaseSequenceResponse:
        with self._one_item.session(request) as live:
            num_dropped = live.pool.manager.one_item.release(live.core.id, checks.sequence_id(request.sequence_id))
        return pb.ReleaseSequenceResponse(num_dropped_blocks=num_dropped)

    async def hand_off_sequence(self, request: pb.HandOffSequenceRequest) -> pb.HandOffSequenceResponse:
        live = own_session(self._session_manager, request)
        sequence_id = checks.sequence_id(request.sequence_id)
        offer = live.pool.manager.hand_offs.offer(live.core.id, sequence_id, secrets.token_bytes(_OFFER_BYTES))
        return pb.HandOffSequenceResponse(offer=offer)

    async def take_sequence(self, request: pb.TakeSequenceRequest) -> pb.TakeSequenceResponse:
        live = own_session(self._session_manager, request)
        sequence_id = checks.sequence_id(request.sequence_id)
        require_all_tenants()  # what is offered may be of any tenant
        if len(request.offer) != _OFFER_BYTES:
            raise InvalidField(f"an offer has {_OFFER_BYTES} bytes", field="offer", limit=_OFFER_BYTES)
        live.pool.manager.hand_offs.take(live.core.id, request.offer, sequence_id)
        return pb.TakeSequenceResponse(sequence=_shown(live, sequence_id))

    async def withdraw_hand_off(self, request: pb.WithdrawHandOffRequest) -> pb.WithdrawHandOffResponse:
        live = own_session(self._session_manager, request)
        live.pool.manager.hand_offs.withdraw(live.core.id, checks.sequence_id(request.sequence_id))
        return pb.WithdrawHandOffResponse()

    async def swap_out_sequence(self, request: pb.SwapOutSequenceRequest) -> pb.SwapOutSequenceResponse:
        return pb.SwapOutSequenceResponse(sequence=await self._swap(request, OneItemCalls.swap_out))

    async def swap_in_sequence(self, request: pb.SwapInSequenceRequest) -> pb.SwapInSequenceResponse:
        return pb.SwapInSequenceResponse(sequence=await self._swap(request, OneItemCalls.swap_in))

    async def get_sequence(self, request: pb.GetSequenceRequest) -> pb.GetSequenceResponse:
        live = readable_session(self._session_manager, request)
        sequence_id = checks.sequence_id(request.sequence_id)
        check_sequence(live, sequence_id)
        view = live.pool.manager.queries.view(live.core.id, sequence_id)
        if not request.include_tokens:
            return pb.GetSequenceResponse(sequence=sequences.sequence_info(view))
        tokens = live.pool.manager.queries.tokens(live.core.id, sequence_id)
        return pb.GetSequenceResponse(sequence=sequences.sequence_info(view, tokens=tokens))

    async def list_sequences(self, request: pb.ListSequencesRequest) -> pb.ListSequencesResponse:
        check_range("page_size", request.page_size, 0, _MAX_PAGE)
        size = request.page_size or _DEFAULT_PAGE
        sessions, own = self._listed(request.session_id), calling()
        ids = ((live.core.id, live.pool.manager.queries.sequence_ids(live.core.id)) for live in sessions)
        if not own.is_for_all:
            ids = ((live.core.id, live.pool.manager.queries.list_sequence_ids(live.core.id, own.tenant)) for live in sessions)
        positions, next_page_token = pagination.page(ids, size, request.page_token)
        pools = {live.core.id: live.pool for live in sessions}
        rows, turns = list[pb.SequenceInfo](), Turns()
        for session_id, sequence_id in positions:
            await turns.offer()
            with suppress(UnknownSession, UnknownSequence):  # it has ended since the call began
                view = pools[SessionId(session_id)].manager.queries.view(SessionId(session_id), sequence_id, with_table=False)
                rows.append(sequences.sequence_info(view, with_table=False))
        return pb.ListSequencesResponse(sequences=rows, next_page_token=next_page_token)

    async def _swap(
        self,
        request: pb.SwapOutSequenceRequest | pb.SwapInSequenceRequest,
        swap: Callable[[OneItemCalls, SessionId, int], Copies],
    ) -> pb.SequenceInfo:
        await self._one_item.wait_for_copies(request)
        with self._one_item.session(request) as live:
            sequence_id = checks.sequence_id(request.sequence_id)
            copies = swap(live.pool.manager.one_item, live.core.id, sequence_id)
        await run_copies(live.pool, copies)
        return _shown(live, sequence_id)

    def _listed(self, session_id: str) -> list[LiveSession]:
        """The session, or all of them in order. Raises UnknownSession."""
        own = calling()
        visible = [live for live in self._session_manager.sessions if own.owns(live.tenant) or live.tenant == ANY_TENANT]
        sessions = [live for live in visible if session_id in ("", live.core.id)]
        if session_id and not sessions:
            raise UnknownSession("no live session has this id")
        return sorted(sessions, key=lambda live: live.core.id)


def _shown(live: LiveSession, sequence_id: SequenceId) -> pb.SequenceInfo:
    return sequences.sequence_info(live.pool.manager.queries.view(live.core.id, sequence_id))
