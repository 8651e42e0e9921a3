"""An engine on a pool in CUDA memory, both services and all kernels, as far as it goes without a device.

The runtime is one of files, tensors claim to be on CUDA, and the kernels are interpreted; all else is what runs on a GPU.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.memory.device.cuda import CudaMemory
from kvkeeper.cache_service.server import start_server as start_cache
from kvkeeper.client import AsyncCacheClient
from kvkeeper.common.cuda import runtime, vmm
from kvkeeper.common.service.process import StartError
from kvkeeper.engine_service.cache_session import kv_memory
from kvkeeper.engine_service.compute.device.device_queue import HostQueue
from kvkeeper.engine_service.compute.graphs.step_sizes import graph_sizes
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.ranks.block_copies import BlockMover
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.processes.holder_process import holding
from tests.support.processes.service_pair import Services, generate, services
from tests.support.stand_ins.fake_cuda import FakeCuda
from tests.support.stand_ins.fake_libcuda import FakeLibcuda
from tests.support.stand_ins.recorded_graphs import RecordedGraphs
from tests.support.worlds.memory_folder import memory_folder
from tests.unit.kernels.gpu.pretend import on_cuda, pretend_inputs_on_cuda, pretend_model_on_cuda

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
PROMPTS = [list(random_tokens(20, seed)) for seed in range(2)]


class _Shown:
    """Device memory as numpy takes it, and keeps alive what lent it, as torch does."""

    def __init__(self, lent):
        self.lent = lent
        self.__array_interface__ = lent.__cuda_array_interface__


@pytest.fixture
def engine_runtime(tmp_path, monkeypatch):
    """The engine's own CUDA runtime, beside the cache service's."""
    before, mine = runtime.cuda_runtime(), FakeCuda(tmp_path, "engine")
    runtime.use_runtime(mine)
    pretend_model_on_cuda(monkeypatch)
    on_host = kv_memory.arena_tensor

    def arena_tensor(arena):
        if not arena.is_on_device:
            return on_host(arena)
        return on_cuda(torch.from_numpy(np.asarray(_Shown(arena.device_bytes()))))[0]

    monkeypatch.setattr(kv_memory, "arena_tensor", arena_tensor)
    yield mine
    runtime.use_runtime(before)


async def start_cuda_cache(world: Services, tmp_path) -> FakeCuda:
    device = FakeCuda(tmp_path, "service")
    config = CacheConfig(
        listen=f"unix:{world.folder}/cache", runtime_dir=world.folder / "run", num_blocks=16, num_host_blocks=8, drain_timeout=0
    )
    world.cache = await start_cache(config, memory=CudaMemory(device, 0))
    return device


async def outputs(world: Services, model, **flags) -> list[list[int]]:
    engine = await world.start_engine(model, block_size=16, chunk_size=12, **flags)
    client = await world.client(engine)
    found = [(await generate(client, prompt, 5)).token_ids[0] for prompt in PROMPTS]
    found.append((await generate(client, PROMPTS[0], 3, n=2)).token_ids[1])  # cached, forked and copied on write
    await engine.stop()
    return found


async def test_the_output_is_that_of_an_engine_on_the_cpu(engine_runtime, tmp_path):
    folder = build_model_folder(tmp_path, tiny_model("qwen3"))
    served = load_served_model(EngineConfig(model=str(folder), progress=False))
    async with services() as world:
        await world.start_cache(num_blocks=16)
        expected = await outputs(world, served)
    on_device = dataclasses.replace(served, device=torch.device("cuda"))
    async with services() as world:
        device = await start_cuda_cache(world, tmp_path)
        try:
            assert await outputs(world, on_device) == expected
            assert engine_runtime.num_opens == 1
            assert (engine_runtime.opened, engine_runtime.pinned) == ({}, set()), "unmapped, and every view let go"
            async with AsyncCacheClient(world.cache.address) as client:
                assert list((await client.check_invariants()).violations) == []
                (pool,) = (await client.stats()).pools
            assert pool.num_copies_on_write > 0
            assert pool.num_hit_tokens > 0
        finally:
            await world.cache.stop()
        assert device.num_freed == 1


async def test_the_way_of_transfers_is_chosen_once_the_host_tier_is_pinned(engine_runtime, tmp_path, monkeypatch):
    pinned = []
    monkeypatch.setattr(BlockMover, "make_ready", lambda self: pinned.append(len(engine_runtime.pinned)))
    folder = build_model_folder(tmp_path, tiny_model("qwen3"))
    served = load_served_model(EngineConfig(model=str(folder), progress=False))
    async with services() as world:
        await start_cuda_cache(world, tmp_path)
        try:
            engine = await world.start_engine(dataclasses.replace(served, device=torch.device("cuda")), block_size=16)
            await engine.stop()
        finally:
            await world.cache.stop()
    assert pinned == [1]


async def test_captured_decodes_give_the_same_output_in_each_session(engine_runtime, tmp_path, monkeypatch):
    pretend_inputs_on_cuda(monkeypatch)
    monkeypatch.setattr(HostQueue, "fetch", lambda self, tensor: tensor.clone())  # as a device: the next replay writes there
    monkeypatch.setattr("kvkeeper.engine_service.compute.graphs.step_sizes._PROMPT_TOKENS", (64,))
    monkeypatch.setattr("kvkeeper.engine_service.compute.model_runner.warm_up_batches", lambda *args, **options: ())
    folder = build_model_folder(tmp_path, tiny_model("qwen3"))
    served = load_served_model(EngineConfig(model=str(folder), progress=False))
    async with services() as world:
        await world.start_cache(num_blocks=16)
        expected = await outputs(world, served)
    captured, replays = [], Counter()

    def make_ready(runner, bounds):
        # Kept nowhere else: a graph that lives on would keep the memory mapped.
        session = len(captured)
        graphs = RecordedGraphs(on_replay=lambda: replays.update([session]))
        runner.make_ready(bounds, graphs, with_retention=False, progress=False)
        captured.append(len(graphs.graphs))

    on_device = dataclasses.replace(served, device=torch.device("cuda"), make_ready=make_ready)
    async with services() as world:
        await start_cuda_cache(world, tmp_path)
        try:
            for _ in range(2):  # the second engine finds the prompts cached, and captures on its own mapping
                assert await outputs(world, on_device, max_sequences=2) == expected
            num_graphs = 3 * len(graph_sizes(2)) + 2
            assert captured == 2 * [num_graphs], "decodes and both kinds of draw; prompts alone, and beside decodes"
            assert min(replays[0], replays[1]) >= 8
            assert (engine_runtime.opened, engine_runtime.pinned) == ({}, set()), "graphs let go of the memory"
        finally:
            await world.cache.stop()


async def test_memory_that_outlives_its_service_gives_the_next_engine_its_prefixes(engine_runtime, tmp_path, monkeypatch):
    library = FakeLibcuda()
    monkeypatch.setattr(vmm, "_driver", vmm.VmmDriver(lambda: library))
    folder = build_model_folder(tmp_path, tiny_model("qwen3"))
    served = load_served_model(EngineConfig(model=str(folder), progress=False))
    async with services() as world:
        await world.start_cache(num_blocks=16)
        expected = await outputs(world, served)
    on_device = dataclasses.replace(served, device=torch.device("cuda"))
    with memory_folder() as memory:
        async with services() as world:
            with holding(world.folder) as holder:
                config = CacheConfig(
                    listen=f"unix:{world.folder}/cache", runtime_dir=world.folder / "run", num_blocks=16, drain_timeout=0,
                    device="cuda", memory_dir=memory, keep=True, hold=holder.address,
                )  # fmt: skip
                for num_cached in (0, 16):
                    world.cache = await start_cache(config)
                    engine = await world.start_engine(on_device, block_size=16, chunk_size=12)
                    client = await world.client(engine)
                    first = await generate(client, PROMPTS[0], 5)
                    assert (first.token_ids[0], first.usage.cached_tokens) == (expected[0], num_cached)
                    await engine.stop()
                    await world.cache.stop()
                    assert (library.handles, library.mapped, library.reserved) == ({}, {}, {})
                    with holder.connect() as asked:
                        assert len(asked.held()) == 1


async def test_an_engine_on_the_cpu_is_told_to_use_the_device(engine_runtime, tmp_path):
    async with services() as world:
        await start_cuda_cache(world, tmp_path)
        try:
            with pytest.raises(StartError, match="pools are in CUDA memory: start this engine with --device cuda"):
                await world.start_engine()
        finally:
            await world.cache.stop()
