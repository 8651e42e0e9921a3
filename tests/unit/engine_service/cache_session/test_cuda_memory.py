"""A session on a pool in CUDA memory: on which device it has to be, and what its host tier is pinned by.

The runtimes are ones of files (FakeCuda). The engine's process sees two devices, and the pool is on the second one.
"""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from kvkeeper.cache_service.memory.device.cuda import CudaMemory
from kvkeeper.client import AsyncCacheClient, KvkeeperError
from kvkeeper.client.arena import Arena
from kvkeeper.common.cuda import runtime
from kvkeeper.engine_service.cache_session import kv_memory
from kvkeeper.engine_service.cache_session.kv_memory import KvMemory, open_memory
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from tests.support.stand_ins.fake_cuda import DEVICE, FakeCuda
from tests.support.worlds.cache_api import DEADLINE, Api, serving

OTHER_DEVICE = "cd" * 16
CONFIG = EngineConfig(model=HASH_TOY, block_size=4, progress=False)


class Engine(FakeCuda):
    """The engine's runtime. Pinning waits where a test has it wait."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "engine", uuids=(OTHER_DEVICE, DEVICE))
        self.is_pinning, self.may_pin = threading.Event(), threading.Event()
        self.may_pin.set()

    def register_host(self, device: int, pointer: int, num_bytes: int) -> None:
        self.is_pinning.set()
        assert self.may_pin.wait(DEADLINE), "the loop stands still meanwhile"
        super().register_host(device, pointer, num_bytes)


class Shown:
    """Device memory as numpy takes it, and keeps alive what lent it, as torch does."""

    def __init__(self, lent: Any) -> None:
        self.lent, self.__array_interface__ = lent, lent.__cuda_array_interface__


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    def arena_tensor(arena: Arena) -> torch.Tensor:
        return torch.from_numpy(np.asarray(Shown(arena.device_bytes())))

    monkeypatch.setattr(kv_memory, "arena_tensor", arena_tensor)
    before, mine = runtime.cuda_runtime(), Engine(tmp_path)
    runtime.use_runtime(mine)
    yield mine
    runtime.use_runtime(before)
    assert (mine.opened, mine.pinned) == ({}, set()), "unmapped, and let go"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serving(num_blocks=9, num_host_blocks=5, memory=CudaMemory(FakeCuda(tmp_path, "service"), 0)) as served:
        yield served
        await served.audit()


@pytest.fixture
async def client(api: Api) -> AsyncIterator[AsyncCacheClient]:
    async with AsyncCacheClient(api.server.address) as made:
        yield made


def model_on(device: str) -> ServedModel:
    return dataclasses.replace(load_served_model(CONFIG), device=torch.device(device))


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
async def test_a_pool_on_another_device_than_the_model_is_refused_with_the_flag_that_helps(
    api: Api, client: AsyncCacheClient, engine: Engine, device: str
) -> None:
    with pytest.raises(KvkeeperError, match=r"--device cuda:1$") as refused:
        await open_memory(client, model_on(device), CONFIG)
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert (engine.num_opens, engine.opened) == (1, {}), "unmapped again"
    (pool,) = (await client.stats()).pools
    assert (pool.num_running_sequences, pool.num_fenced_blocks) == (0, 0)
    assert not (await api.stats()).sessions
    memory = await open_memory(client, model_on("cuda:1"), CONFIG)
    assert engine.pinned
    await memory.close()


async def test_the_host_tier_is_pinned_in_a_thread_while_the_lease_is_renewed(
    client: AsyncCacheClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds for each 10 GB, in which a loop that stood still would lose the session."""
    renew, has_renewed = KvMemory.renew, asyncio.Event()

    async def renewed(memory: KvMemory, completed_step_id: int = 0) -> None:
        await renew(memory, completed_step_id)
        has_renewed.set()

    monkeypatch.setattr(KvMemory, "renew", renewed)
    monkeypatch.setattr(kv_memory, "_RENEWALS", 1000)
    engine.may_pin.clear()
    opening = asyncio.create_task(open_memory(client, model_on("cuda:1"), CONFIG))
    async with asyncio.timeout(2 * DEADLINE):
        await has_renewed.wait()
    assert engine.is_pinning.is_set()
    assert (engine.pinned, opening.done()) == (set(), False)
    engine.may_pin.set()
    memory = await opening
    assert len(engine.pinned) == 1
    await memory.close()
