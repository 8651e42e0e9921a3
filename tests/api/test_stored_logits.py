"""Stored logits over the API: what a client that samples by itself does with them."""

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.errors import KvkeeperError
from tests.support.worlds.cache_api import SPEC, commit_columns, int32s, le32, le64, refused, serving

LOGITS = np.linspace(-5, 5, 50_000, dtype="<f4")  # 200 KB


@pytest.mark.parametrize("engine", [True, False])
async def test_a_full_hit_is_told_and_read(engine: bool) -> None:
    async with serving(logits_memory=1 << 20) as api:
        assert (await api.stub.GetCapabilities(pb.GetCapabilitiesRequest())).logits_memory_bytes == 1 << 20
        session = await api.open(engine=engine)
        await session.create(1, 8)
        await session.step(1, **_start(1))
        await session.step(2, **commit_columns(1, 8))
        await session.call("StoreLogits", sequence_id=1, num_tokens=8, logits=LOGITS.tobytes())
        await session.create(2, 8)
        reply = await session.step(3, **_start(2))
        assert (int32s(reply.start_num_hit_tokens), int32s(reply.start_num_reserved_tokens)) == ([8], [8])
        assert int32s(reply.start_has_logits) == [1]
        assert (await session.call("ReadLogits", sequence_id=2)).logits == LOGITS.tobytes()
        assert not (await session.step(4)).start_has_logits
        await refused(session.call("ReadLogits", sequence_id=2), "UNKNOWN_LOGITS")
        (stats,) = (await api.stats()).pools
        assert (stats.num_full_hits, stats.num_stored_logits) == (1, 1)
        await api.audit()


async def test_a_service_without_memory_for_logits_says_so() -> None:
    async with serving() as api, AsyncCacheClient(api.server.address) as client, await client.open_session(SPEC) as session:
        assert (await client.capabilities()).logits_memory_bytes == 0
        await session.create_sequence(1, range(4))
        await session.extend(1, 4)
        await session.commit(1, 4)
        with pytest.raises(KvkeeperError, match="WRONG_STATE"):
            await session.store_logits(1, 4, LOGITS)
        with pytest.raises(TypeError):
            await session.store_logits(1, 4, np.zeros(3))  # 64 bits


async def test_the_client_stores_and_reads_arrays() -> None:
    async with serving(logits_memory=1 << 20) as api, AsyncCacheClient(api.server.address) as client:
        session = await client.open_session(SPEC)
        await session.create_sequence(1, range(4))
        await session.extend(1, 4)
        await session.commit(1, 4)
        await session.store_logits(1, 4, LOGITS)
        with pytest.raises(KvkeeperError, match="UNKNOWN_LOGITS"):
            await session.read_logits(1)
        assert (await api.stats()).pools[0].num_stored_logits == 1


def _start(sequence_id: int) -> dict[str, bytes]:
    return {
        "start_sequence_ids": le64(sequence_id),
        "start_max_new_tokens": le32(100),
        "start_max_hit_tokens": le32(100),
    }
