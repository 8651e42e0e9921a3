"""The cache service for threads: CacheClient makes calls to the service as a whole and opens sessions (session_sync.py)."""

from typing import TYPE_CHECKING, TypeVar

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache.v1 import cache_service_pb2_grpc as pb_grpc
from kvkeeper.client import cache_calls
from kvkeeper.client.cache_calls import Call
from kvkeeper.client.credentials import Credentials
from kvkeeper.client.retry import CallOptions
from kvkeeper.client.targets import cache_address
from kvkeeper.client.transport import Transport

if TYPE_CHECKING:
    from kvkeeper.client.session_sync import CacheSession

T = TypeVar("T")


class CacheClient:
    """One channel to a cache service. target is host:port or unix:/path; connects with the first call.

    Without one it is KVKEEPER_CACHE_LISTEN, or else the default of the service.
    """

    def __init__(
        self,
        target: str | None = None,
        options: CallOptions | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """credentials: None takes those of the environment. Raises KvkeeperError where they cannot be used."""
        target = target or cache_address()
        self._transport = Transport(target, options or CallOptions(), pb_grpc.CacheServiceStub, credentials)

    def __enter__(self) -> "CacheClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_session(
        self,
        spec: pb.KvSpec,
        executor: "pb.Executor" = pb.EXECUTOR_CACHE,
        ttl_ms: int = 0,
        client_name: str = "",
        *,
        read_only_memory: bool = False,
        packs_host_blocks: bool = False,
    ) -> "CacheSession":
        """Open a session on the pool of spec; ttl_ms 0 is the service's default lease.

        read_only_memory: attach() maps the memory to be read alone. packs_host_blocks: transfer orders are run here, and blocks
        are converted as PoolInfo.host_kv_dtype says.
        """
        from kvkeeper.client.session_sync import CacheSession  # numpy, which the calls without a session do not need

        return CacheSession(
            self._transport,
            self._do(cache_calls.open_session(spec, executor, ttl_ms, client_name, read_only_memory, packs_host_blocks)),
        )

    def capabilities(self) -> pb.GetCapabilitiesResponse:
        return self._do(cache_calls.capabilities())

    def stats(self) -> pb.GetStatsResponse:
        return self._do(cache_calls.stats())

    def check_invariants(self) -> pb.CheckInvariantsResponse:
        return self._do(cache_calls.check_invariants())

    def list_sequences(self, session_id: str = "") -> tuple[pb.SequenceInfo, ...]:
        """Sequences of one session, or of all, without tables."""
        return cache_calls.all_sequences(self._transport, session_id)

    def close(self) -> None:
        self._transport.close()

    def _do(self, call: Call[T]) -> T:
        return cache_calls.do(self._transport, call)
