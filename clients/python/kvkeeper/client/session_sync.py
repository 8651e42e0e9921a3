"""One session of the cache service for threads: the calls of session.py, blocking.

A session is not for use from two threads at once.
"""

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.backends import Closing, blocking
from kvkeeper.client.session import WATCH_TIMEOUT_S, AsyncCacheSession
from kvkeeper.client.transport import Stream


class CacheSession(Closing):
    __doc__ = AsyncCacheSession.__doc__

    def __init__(self, inner: AsyncCacheSession) -> None:
        """inner: of a client with a BlockingBackend."""
        self._inner = inner
        self.session_id: str = inner.session_id
        self.epoch: int = inner.epoch
        self.pool: pb.PoolInfo = inner.pool
        self.ttl_ms: int = inner.ttl_ms

    @property
    def step_id(self) -> int:
        """The id of the last step that was applied."""
        return self._inner.step_id

    @property
    def has_step_lane(self) -> bool:
        """Whether steps go over a socket of this host beside gRPC."""
        return self._inner.has_step_lane

    @property
    def attach_point(self) -> tuple[str, str]:
        """Path and token of the attach socket, for the processes of other ranks: see arena.attach_arena."""
        return self._inner.attach_point

    def disconnect(self) -> None:
        """Drop the stream of steps without a word to the service, as after its end; the session lives on for a short grace."""
        self._inner.disconnect()

    def watch_events(
        self,
        tenant: str = "",
        timeout_s: float = WATCH_TIMEOUT_S,
        include_token_ids: bool = False,
        adapter: str = "",
        cache_salt: str = "",
    ) -> Stream:
        """Iterate over the blocks cached for the tenant, of one adapter and salt, then every change of them.

        cancel() ends the watch.

        The messages are pb.WatchEventsResponse. A reader that falls behind gets WATCH_LAGGED and has to watch again.
        include_token_ids: of the blocks that are new to the reader, as LE32.
        """
        return Stream(self._inner.watch_events(tenant, timeout_s, include_token_ids, adapter, cache_salt))

    attach = blocking(AsyncCacheSession.attach)
    attach_step_lane = blocking(AsyncCacheSession.attach_step_lane)
    step = blocking(AsyncCacheSession.step)
    renew = blocking(AsyncCacheSession.renew)
    close = blocking(AsyncCacheSession.close)
    create_sequence = blocking(AsyncCacheSession.create_sequence)
    create_sequences = blocking(AsyncCacheSession.create_sequences)
    extend = blocking(AsyncCacheSession.extend)
    commit = blocking(AsyncCacheSession.commit)
    fork = blocking(AsyncCacheSession.fork)
    truncate = blocking(AsyncCacheSession.truncate)
    update = blocking(AsyncCacheSession.update)
    release = blocking(AsyncCacheSession.release)
    hand_off = blocking(AsyncCacheSession.hand_off)
    take = blocking(AsyncCacheSession.take)
    withdraw = blocking(AsyncCacheSession.withdraw)
    swap_out = blocking(AsyncCacheSession.swap_out)
    swap_in = blocking(AsyncCacheSession.swap_in)
    get = blocking(AsyncCacheSession.get)
    get_block = blocking(AsyncCacheSession.get_block)
    match_prefix = blocking(AsyncCacheSession.match_prefix)
    explain_match = blocking(AsyncCacheSession.explain_match)
    check_admission = blocking(AsyncCacheSession.check_admission)
    pin_prefix = blocking(AsyncCacheSession.pin_prefix)
    unpin_prefix = blocking(AsyncCacheSession.unpin_prefix)
    hint_prefixes = blocking(AsyncCacheSession.hint_prefixes)
    store_logits = blocking(AsyncCacheSession.store_logits)
    read_logits = blocking(AsyncCacheSession.read_logits)
    clear_prefix_cache = blocking(AsyncCacheSession.clear_prefix_cache)
    evict_blocks = blocking(AsyncCacheSession.evict_blocks)
    select_victims = blocking(AsyncCacheSession.select_victims)
    collect_garbage = blocking(AsyncCacheSession.collect_garbage)
    write_kv = blocking(AsyncCacheSession.write_kv)
    read_kv = blocking(AsyncCacheSession.read_kv)
    list = blocking(AsyncCacheSession.list)
