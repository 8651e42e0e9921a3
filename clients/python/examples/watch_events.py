"""Watch what a pool caches and evicts, as a router would that sends requests to the replica with the longest cached prefix.

    python watch_events.py [ADDRESS]

The address is that of a cache service, which `kvkeeper cache` starts; the default is 127.0.0.1:7410. The events are those of
this example's own pool, in which it stores one prompt and evicts it.
"""

import asyncio
import sys

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient, AsyncCacheSession, KvkeeperError, targets

SPEC = pb.KvSpec(
    model_id="example-events",
    num_layers=2,
    num_kv_heads=2,
    head_dim=4,
    kv_dtype=pb.KV_DTYPE_FLOAT32,
    block_size=4,
    layout=pb.KV_LAYOUT_BLOCK_MAJOR,
)
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]


async def main(address: str) -> None:
    async with AsyncCacheClient(address) as client, await client.open_session(SPEC, client_name="example") as session:
        events = session.watch_events()
        async for event in events:
            # First what is cached already, in SNAPSHOT events up to SNAPSHOT_END; from then on every change.
            print(f"{pb.EventKind.Name(event.kind)}: {len(event.block_names)} blocks, revision {event.revision}")
            if event.kind == pb.EVENT_KIND_SNAPSHOT_END:
                await store_prompt(session)
            elif event.kind == pb.EVENT_KIND_STORED:
                await session.evict_blocks(num_free_blocks=session.pool.num_blocks - 1)
            elif event.kind == pb.EVENT_KIND_REMOVED:
                break
        events.cancel()


async def store_prompt(session: AsyncCacheSession) -> None:
    """The calls for one sequence at a time, which a program that is not an engine may find simpler than steps."""
    await session.create_sequence(1, PROMPT)
    await session.extend(1, len(PROMPT))
    await session.commit(1, len(PROMPT))
    await session.release(1)


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else targets.CACHE))
    except KvkeeperError as error:
        sys.exit(str(error))
