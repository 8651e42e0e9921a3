"""What is cached for a tenant, and every change of it, as the cache service reports it to a watch of this engine's session.

First all that is cached, parents before children. One message is held at a time: a reader that is slow here is slow there, and
is cut off by the cache service, whose queue is bounded.
"""

import math
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.new_sequence import root_name
from kvkeeper.client.session import AsyncCacheSession

from ..values.request import Int32Array

_ADDED = (pb.EVENT_KIND_SNAPSHOT, pb.EVENT_KIND_STORED)


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks each below the one before it. parent: of the first; None where it starts a prompt. token_ids [n, block_size]."""

    parent: bytes | None
    names: list[bytes]
    token_ids: Int32Array


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks that are in no tier any more, or that nothing leads to any more."""

    names: list[bytes]


CacheEvent = StoredBlocks | RemovedBlocks


async def cache_events(session: AsyncCacheSession, tenant: str) -> AsyncGenerator[list[CacheEvent], None]:
    """The events of each message that has some. Raises KvkeeperError when the watch or the session ends."""
    spec = session.pool.spec
    first_parent = root_name(spec, tenant)
    stream = session.watch_events(tenant, timeout_s=math.inf, include_token_ids=True)
    try:
        async for message in stream:
            if events := list(_events(message, first_parent, spec.block_size)):
                yield events
    finally:
        stream.cancel()


def _events(message: pb.WatchEventsResponse, first_parent: bytes, block_size: int) -> Iterator[CacheEvent]:
    """The events of one message. A tier says nothing here: a block of any can be a hit. Without tokens there are no blocks."""
    if message.kind == pb.EVENT_KIND_REMOVED:
        yield RemovedBlocks(list(message.block_names))
    elif message.kind in _ADDED and message.token_ids:
        names, parents = list(message.block_names), list(message.parent_names)
        tokens = np.frombuffer(message.token_ids, "<i4").reshape(len(names), block_size)
        starts = [row for row in range(len(names)) if row == 0 or parents[row] != names[row - 1]]
        for start, stop in zip(starts, [*starts[1:], len(names)], strict=True):
            parent = None if parents[start] == first_parent else parents[start]
            yield StoredBlocks(parent, names[start:stop], tokens[start:stop])
