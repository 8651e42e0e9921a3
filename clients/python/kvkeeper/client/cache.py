"""The cache service for asyncio: AsyncCacheClient makes calls to the service as a whole and opens sessions (session.py).

Every call raises KvkeeperError. cache_sync.py has the same for threads. Nothing here needs numpy, which takes longer to import
than most of these calls take.
"""

from typing import TYPE_CHECKING

import grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache.v1 import cache_service_pb2_grpc as pb_grpc
from kvkeeper.client.backends import ASYNCIO, Backend
from kvkeeper.client.credentials import Credentials
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import SLICED_TIMEOUT_S, CallOptions
from kvkeeper.client.targets import cache_address
from kvkeeper.client.transport import AsyncTransport

if TYPE_CHECKING:
    from kvkeeper.client.session import AsyncCacheSession

# Of the cache service's protocol; docs/api/protocol.md says what needs a new number.
PROTOCOL_VERSION = 3
OLDEST_PROTOCOL_VERSION = 1  # that this client can speak
_OF_GROUP_SHAPES = 3  # an older service would take all groups for such of the spec's heads


class AsyncCacheClient:
    """One channel to a cache service. target is host:port or unix:/path; connects with the first call.

    Without one it is KVKEEPER_CACHE_LISTEN, or else the default of the service.
    """

    def __init__(
        self,
        target: str | None = None,
        options: CallOptions | None = None,
        credentials: Credentials | None = None,
        *,
        backend: Backend = ASYNCIO,
    ) -> None:
        """credentials: None takes those of the environment. Raises KvkeeperError where they cannot be used.

        backend: how calls wait; CacheClient gives another one.
        """
        self._transport = AsyncTransport(
            target or cache_address(), options or CallOptions(), pb_grpc.CacheServiceStub, credentials, backend
        )

    async def __aenter__(self) -> "AsyncCacheClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open_session(
        self,
        spec: pb.KvSpec,
        executor: "pb.Executor" = pb.EXECUTOR_CACHE,
        ttl_ms: int = 0,
        client_name: str = "",
        *,
        read_only_memory: bool = False,
        packs_host_blocks: bool = False,
    ) -> "AsyncCacheSession":
        """Open a session on the pool of spec; ttl_ms 0 is the service's default lease.

        read_only_memory: attach() maps the memory to be read alone. packs_host_blocks: transfer orders are run here, and blocks
        are converted as PoolInfo.host_kv_dtype says.
        """
        request = pb.OpenSessionRequest(
            spec=spec,
            executor=executor,
            ttl_ms=ttl_ms,
            client_name=client_name,
            protocol_version=PROTOCOL_VERSION,
            read_only_memory=read_only_memory,
            packs_host_blocks=packs_host_blocks,
        )
        opened = await self._transport.call_by_name("OpenSession", request)
        has_shapes = any(group.num_kv_heads or group.HasField("page") for group in spec.groups)
        least = _OF_GROUP_SHAPES if has_shapes else OLDEST_PROTOCOL_VERSION
        _require_spoken(opened.protocol_version or 1, least)  # a service of before there were versions names none
        from kvkeeper.client.session import AsyncCacheSession  # with numpy

        return AsyncCacheSession(self._transport, opened)

    async def capabilities(self) -> pb.GetCapabilitiesResponse:
        return await self._transport.call_by_name("GetCapabilities", pb.GetCapabilitiesRequest())

    async def stats(self) -> pb.GetStatsResponse:
        return await self._transport.call_by_name("GetStats", pb.GetStatsRequest())

    async def check_invariants(self) -> pb.CheckInvariantsResponse:
        return await self._transport.call_by_name("CheckInvariants", pb.CheckInvariantsRequest(), SLICED_TIMEOUT_S)

    async def list_sequences(self, session_id: str = "") -> tuple[pb.SequenceInfo, ...]:
        """Sequences of one session, or of all, without tables."""
        request = pb.ListSequencesRequest(session_id=session_id)
        return await self._transport.list_all("ListSequences", request, "sequences")

    async def close(self) -> None:
        await self._transport.close()


def _require_spoken(version: int, least: int) -> None:
    """Raises KvkeeperError for a service that this client does not understand. What it opened ends with its lease.

    least: the oldest version that has what the session asks for.
    """
    if version < least:
        mine = f"{least} to {PROTOCOL_VERSION}"
        text = f"the service speaks version {version} of the protocol, and this client {mine}: upgrade the cache service"
        raise KvkeeperError(grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION_UNSUPPORTED", text)
