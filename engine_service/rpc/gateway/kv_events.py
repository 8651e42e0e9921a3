"""SubscribeKvEvents: what is cached here, as batches for a gateway that routes each prompt to the engine that has most of it.

Each subscription starts from nothing: `cleared`, then all that is cached, then every change; so does each one that went wrong,
be it that the cache service was started anew or that the gateway was too slow. Numbers go on from the last one that the
gateway had, so they never go back, and it never finds a gap. A refusal might end events for good, so whatever the cache
service says, the call goes on and waits.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable

import structlog
from smg_grpc_proto.generated import common_pb2 as pb

from kvkeeper.client.errors import KvkeeperError

from ...cache_session.cache_events import CacheEvent, StoredBlocks, cache_events
from ...loop.engine import Engine
from ...values.errors import InvalidField

log = structlog.get_logger()

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_CLEARED = pb.KvCacheEvent(cleared=pb.KvCacheCleared())
_MAX_NUMBER = 2**63  # of the last batch that a gateway may name: as many follow


async def batches(engine: Engine, tenant: str, last_number: int) -> AsyncGenerator[pb.KvEventBatch, None]:
    """The batches of a tenant's cache, until the engine stops. Raises InvalidField.

    last_number: that of the last batch that the gateway had, or 0.
    """
    if last_number > _MAX_NUMBER:
        text = f"start_sequence_number: at most {_MAX_NUMBER}"
        raise InvalidField(text, field="start_sequence_number", limit=_MAX_NUMBER)
    number, pause, has_sent = last_number + 1, _FIRST_PAUSE_S, False
    yield _batch(number, [_CLEARED])  # at once, because a gateway waits for an answer for seconds only
    while (memory := await engine.wait_memory()) is not None:
        try:
            async with contextlib.aclosing(cache_events(memory.session, tenant)) as messages:
                async for events in messages:
                    number, pause, has_sent = number + 1, _FIRST_PAUSE_S, True
                    yield _batch(number, map(_encode, events))
        except KvkeeperError as error:
            log.info("kv_events_interrupted", code=error.code.name, reason=error.reason)
        if has_sent:
            number, has_sent = number + 1, False
            yield _batch(number, [_CLEARED])
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _batch(number: int, events: Iterable[pb.KvCacheEvent]) -> pb.KvEventBatch:
    return pb.KvEventBatch(sequence_number=number, timestamp=time.time(), events=events)


def _encode(event: CacheEvent) -> pb.KvCacheEvent:
    if not isinstance(event, StoredBlocks):
        return pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=map(_hash, event.names)))
    block_size = event.token_ids.shape[1]
    stored = pb.KvBlocksStored(
        parent_block_hash=None if event.parent is None else _hash(event.parent),
        blocks=[
            pb.KvBlock(block_hash=_hash(name), token_ids=tokens, block_size=block_size)
            for name, tokens in zip(event.names, event.token_ids.tolist(), strict=True)
        ],
    )
    return pb.KvCacheEvent(stored=stored)


def _hash(name: bytes) -> int:
    """A block's number: of its name, and so of its tokens and of all before them; the same after every restart."""
    return int.from_bytes(name[:8], "little", signed=True)
