"""Calls on the service and on sessions: GetCapabilities, OpenSession, RenewSession, CloseSession."""

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.common.service import VERSION
from kvkeeper.common.service.listen import is_of_this_host
from kvkeeper.common.service.methods import max_prompt_message_bytes as prompt_message_bytes
from kvkeeper.common.service.methods import peer
from kvkeeper.common.trust.caller import calling

from ..config import CacheConfig
from ..core.values.errors import InvalidField
from ..core.values.step_columns import MAX_STEP_ITEMS
from ..core.values.types import Executor
from ..runtime.session_manager import DEFAULT_TTL, MAX_TTL, MAX_UNATTACHED_TTL, MIN_TTL, SessionManager
from .convert.checks import check_range, check_text
from .convert.kv_spec import kv_spec
from .convert.reports import pool_info
from .convert.step import transfer_report
from .convert.versions import SPOKEN
from .lane_calls import LANE_CALLS
from .methods import max_message_bytes
from .ownership import check_own, counted_caller, require_all_tenants


class SessionCalls:
    """attach_path is the socket that OpenSession sends processes to that want to map the arena."""

    def __init__(self, config: CacheConfig, session_manager: SessionManager, attach_path: str) -> None:
        self._config = config
        self._session_manager = session_manager
        self._attach_path = attach_path

    async def get_capabilities(self, _: pb.GetCapabilitiesRequest) -> pb.GetCapabilitiesResponse:
        return pb.GetCapabilitiesResponse(
            version=VERSION,
            epoch=self._session_manager.epoch,
            max_message_bytes=max_message_bytes(self._config.max_sequences),
            max_prompt_message_bytes=prompt_message_bytes(self._session_manager.registry.max_tokens),
            min_ttl_ms=_ms(MIN_TTL),
            max_ttl_ms=_ms(MAX_TTL),
            max_unattached_ttl_ms=_ms(MAX_UNATTACHED_TTL),
            max_sequences=self._config.max_sequences,
            max_step_items=MAX_STEP_ITEMS,
            max_tokens_per_sequence=self._config.most_tokens,
            pools=[pool_info(pool.info) for pool in self._session_manager.registry.pools],
            max_sessions=self._config.max_sessions,
            logits_memory_bytes=self._config.logits_memory,
            newest_protocol_version=SPOKEN.newest,
            oldest_protocol_version=SPOKEN.oldest,
        )

    async def open_session(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        version = SPOKEN.of_session(request.protocol_version)
        ttl_ms = request.ttl_ms or _ms(DEFAULT_TTL)
        check_range("ttl_ms", ttl_ms, _ms(MIN_TTL), _ms(MAX_UNATTACHED_TTL))
        check_text("client_name", request.client_name, 256)
        check_range("executor", request.executor, 0, max(Executor))
        spec, executor = kv_spec(request.spec), Executor(request.executor or Executor.CACHE)
        if executor is Executor.ENGINE:
            require_all_tenants()  # it writes the memory of all, and runs copies of all
        read_only = request.read_only_memory
        if read_only and executor is Executor.ENGINE:
            raise InvalidField("read_only_memory: an engine writes", field="read_only_memory")
        is_near = is_of_this_host(peer.get())  # no other caller can use the attach socket, or is to learn a path
        live = await self._session_manager.open(
            spec,
            executor,
            ttl_ms / 1000,
            request.client_name,
            calling().tenant,
            caller=counted_caller(request.client_name),
            read_only_memory=read_only,
            packs_host_blocks=request.packs_host_blocks,
            takes_partial=request.takes_partial_blocks,
        )
        return pb.OpenSessionResponse(
            session_id=live.core.id,
            epoch=live.core.epoch,
            ttl_ms=ttl_ms,
            pool=pool_info(live.pool.info),
            attach_token=live.attach_token if is_near else "",
            attach_socket_path=self._attach_path if is_near else "",
            offers_step_lane=is_near,
            lane_calls=LANE_CALLS if is_near else (),
            protocol_version=version,
        )

    async def renew_session(self, request: pb.RenewSessionRequest) -> pb.RenewSessionResponse:
        report = transfer_report(request)
        check_own(self._session_manager, request)
        live = self._session_manager.require(request.session_id, request.epoch, published=False)
        live.core.check_complete(request.completed_step_id)
        if request.completed_step_id or len(report[0]) or len(report[1]):
            live.pool.manager.steps.complete(live.core.id, request.completed_step_id, *report)
            live.core.complete(request.completed_step_id)
            live.pool.publish_soon()  # what waited for a copy
        return pb.RenewSessionResponse(
            ttl_ms=_ms(live.core.ttl),
            expected_step_id=live.core.step_id + 1,
            num_reclaim_hint_blocks=live.pool.manager.sessions.reclaim_hint(live.core.id),
        )

    async def close_session(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        check_own(self._session_manager, request)
        live = self._session_manager.find(request.session_id)
        if live is not None:
            await live.pool.published()  # in slices, so that nothing of it is left for the end
        result = self._session_manager.close(request.session_id, request.epoch, drained=request.drained)
        return pb.CloseSessionResponse(
            num_released_sequences=result.num_released_sequences, num_quarantined_blocks=result.num_quarantined_blocks
        )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
