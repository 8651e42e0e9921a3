"""Memory of pools is made in a thread: the service answers while a host tier is pinned, which takes seconds for each 10 GB."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.memory.device.cuda import CudaMemory
from kvkeeper.cache_service.runtime.arena_supply import ArenaSupply
from tests.support.stand_ins.fake_cuda import FakeCuda
from tests.support.worlds.cache_api import BLOCK_BYTES, DEADLINE, serving


class SlowPin(FakeCuda):
    """A runtime whose pinning waits until a test lets it go on, which takes a loop that runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "service")
        self.is_pinning, self.may_pin = threading.Event(), threading.Event()

    def register_host(self, device: int, pointer: int, num_bytes: int) -> None:
        self.is_pinning.set()
        assert self.may_pin.wait(DEADLINE), "the loop stands still meanwhile"
        super().register_host(device, pointer, num_bytes)

    async def wait_pinning(self) -> None:
        async with asyncio.timeout(DEADLINE):
            while not self.is_pinning.is_set():  # noqa: ASYNC110  it is set in a thread
                await asyncio.sleep(0)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[SlowPin]:
    made = SlowPin(tmp_path)
    yield made
    assert made.pinned == set()


@pytest.mark.parametrize("is_ahead", [True, False], ids=["reserved", "for a spec"])
async def test_the_loop_runs_while_a_host_tier_is_pinned(device: SlowPin, is_ahead: bool) -> None:
    supply = ArenaSupply(CacheConfig(num_blocks=9), CudaMemory(device, 0), None, lambda: 0.0)
    pinning = asyncio.ensure_future(supply.reserve(1, 1 << 12, 1 << 12) if is_ahead else supply.take_host(1 << 12))
    await device.wait_pinning()
    assert (device.pinned, pinning.done()) == (set(), False)
    device.may_pin.set()
    hosts = await pinning
    assert len(device.pinned) == 1
    if hosts is not None:
        hosts.close()
    supply.close(keep=False)


async def test_the_service_answers_while_a_pool_gets_its_memory(device: SlowPin) -> None:
    async with serving(num_blocks=9, num_host_blocks=5, memory=CudaMemory(device, 0)) as api:
        opening = asyncio.create_task(api.open())
        await device.wait_pinning()
        assert not (await api.stats()).pools
        assert not opening.done()
        device.may_pin.set()
        session = await opening
        assert session.opened.pool.host_arena_bytes == 5 * BLOCK_BYTES
