"""The cache service for threads: the calls of cache.py, blocking. Its sessions are in session_sync.py."""

from typing import TYPE_CHECKING

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.backends import BLOCKING, Closing, blocking, run
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.credentials import Credentials
from kvkeeper.client.retry import CallOptions

if TYPE_CHECKING:
    from kvkeeper.client.session_sync import CacheSession


class CacheClient(Closing):
    __doc__ = AsyncCacheClient.__doc__

    def __init__(
        self,
        target: str | None = None,
        options: CallOptions | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """credentials: None takes those of the environment. Raises KvkeeperError where they cannot be used."""
        self._inner = AsyncCacheClient(target, options, credentials, backend=BLOCKING)

    def open_session(
        self,
        spec: pb.KvSpec,
        executor: "pb.Executor" = pb.EXECUTOR_CACHE,
        ttl_ms: int = 0,
        client_name: str = "",
        *,
        read_only_memory: bool = False,
        packs_host_blocks: bool = False,
        takes_partial_blocks: bool = False,
    ) -> "CacheSession":
        """Open a session on the pool of spec; ttl_ms 0 is the service's default lease.

        read_only_memory: attach() maps the memory to be read alone. packs_host_blocks: transfer orders are run here, and blocks
        are converted as PoolInfo.host_kv_dtype says. takes_partial_blocks: hits may end within a block.
        """
        from kvkeeper.client.session_sync import CacheSession  # with numpy

        flags = {"read_only_memory": read_only_memory, "packs_host_blocks": packs_host_blocks}
        flags["takes_partial_blocks"] = takes_partial_blocks
        return CacheSession(run(self._inner.open_session(spec, executor, ttl_ms, client_name, **flags)))

    capabilities = blocking(AsyncCacheClient.capabilities)
    stats = blocking(AsyncCacheClient.stats)
    check_invariants = blocking(AsyncCacheClient.check_invariants)
    list_sequences = blocking(AsyncCacheClient.list_sequences)
    close = blocking(AsyncCacheClient.close)
