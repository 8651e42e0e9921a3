"""Memory of pools is made in a thread: the service answers while a host tier is pinned, which takes seconds for each 10 GB."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.memory.arena import Arena
from kvkeeper.cache_service.memory.device.cuda import CudaMemory
from kvkeeper.cache_service.memory.shared_memory import SharedMemory
from kvkeeper.cache_service.runtime.arena_supply import ArenaSupply
from kvkeeper.common.service.memory_limit import OutOfMemory
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


class TogetherMemory(SharedMemory):
    """Each allocation waits until as many as there are to be are under way; from the given one on they fail."""

    def __init__(self, num_together: int, num_good: int) -> None:
        self.meeting, self.num_good, self.made = threading.Barrier(num_together), num_good, list[Arena]()

    def allocate(self, num_bytes: int, rank: int = 0) -> Arena:
        if self.meeting.wait(DEADLINE) >= self.num_good:
            raise OutOfMemory("no room")
        self.made.append(super().allocate(num_bytes))
        return self.made[-1]


async def test_the_memory_of_pools_is_reserved_side_by_side() -> None:
    memory = TogetherMemory(3, 3)
    supply = ArenaSupply(CacheConfig(num_blocks=9), memory, None, lambda: 0.0)
    await supply.reserve(3, 1 << 12, 0)
    assert {id(await supply.take(1 << 12)) for _ in range(3)} == {id(arena) for arena in memory.made}
    assert not supply.has_spare


async def test_memory_that_does_not_fit_beside_other_memory_leaves_that_to_be_closed() -> None:
    memory = TogetherMemory(3, 2)
    supply = ArenaSupply(CacheConfig(num_blocks=9), memory, None, lambda: 0.0)
    with pytest.raises(OutOfMemory, match="no room"):
        await supply.reserve(3, 1 << 12, 0)
    assert len(memory.made) == 2
    supply.close(keep=False)
    assert not any(hasattr(arena, "array") for arena in memory.made)


async def test_the_service_answers_while_a_pool_gets_its_memory(device: SlowPin) -> None:
    async with serving(num_blocks=9, num_host_blocks=5, memory=CudaMemory(device, 0)) as api:
        opening = asyncio.create_task(api.open())
        await device.wait_pinning()
        assert not (await api.stats()).pools
        assert not opening.done()
        device.may_pin.set()
        session = await opening
        assert session.opened.pool.host_arena_bytes == 5 * BLOCK_BYTES
