"""Sessions of the benchmarks: one spec for all, and the sequences of a load in them."""

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems
from tests.benchmarks.growing import BLOCK_SIZE, Growing
from tests.benchmarks.turnover import Turnover

Load = Growing | Turnover

_SPEC = pb.KvSpec(
    model_id="bench",
    revision="0",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    kv_dtype=pb.KV_DTYPE_FLOAT16,
    block_size=BLOCK_SIZE,
    layout=pb.KV_LAYOUT_BLOCK_MAJOR,
    compute_dtype="float32",
)


async def open_session(client: AsyncCacheClient) -> AsyncCacheSession:
    """With the longest lease: what stands beside it in a benchmark may keep it waiting."""
    return await client.open_session(_SPEC, pb.EXECUTOR_ENGINE, ttl_ms=60_000, client_name="bench")


async def ready_session(client: AsyncCacheClient, load: Load, seed: int) -> AsyncCacheSession:
    """A session in which a load has started."""
    session = await open_session(client)
    await start(session, load, seed)
    return session


async def start(session: AsyncCacheSession, load: Load, seed: int) -> None:
    """Starts the sequences that a load begins with. Prompts of two seeds share nothing."""
    await create(session, list(zip(load.ids.tolist(), load.prompts(), strict=True)), seed)
    columns, most = load.start_columns(), session.pool.max_step_items
    for at in range(0, load.num_sequences, most):
        await session.step(StepItems(**{name: column[at : at + most] for name, column in columns.items()}))


async def create(session: AsyncCacheSession, sequences: list[tuple[int, np.ndarray]], seed: int) -> None:
    """Creates sequences of a load: ids and prompts."""
    for sequence_id, prompt in sequences:
        await session.create_sequence(sequence_id, (prompt + 32_000 * seed).astype(np.int32))
