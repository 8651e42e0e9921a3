"""A session that is opened while its lease runs, and whose other ranks attach late, are refused, or lose their device."""

import dataclasses
import gc
import mmap
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.engine_service.cache_session.kv_memory import KvMemory, open_memory
from kvkeeper.engine_service.compute.device import device_errors
from kvkeeper.engine_service.compute.device.device_errors import DeviceFault, ReportedFault
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.ranks.messages import RankLost, RankRefused
from tests.support.stand_ins.device_faults import out_of_memory

DEADLINE, BLOCK_SIZE, NUM_BLOCKS = 20.0, 4, 3


class Arena:
    """Memory that cannot be unmapped while something views it."""

    is_on_device = False

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        self.array = np.frombuffer(self._memory, np.uint8)
        self.host_array = self.array[:0]

    def close(self) -> None:
        del self.array, self.host_array
        self._memory.close()


class World:
    """A cache service that answers, and other ranks that attach as a test says."""

    def __init__(self, attach: Callable[[], None]) -> None:
        self.config = EngineConfig(model=HASH_TOY, block_size=BLOCK_SIZE)
        self.model = load_served_model(self.config)
        self.is_renewed, self.calls, self._attach = threading.Event(), list[Any](), attach
        self.block_bytes = self.model.layout(BLOCK_SIZE).block_bytes
        self.pool = pb.PoolInfo(num_blocks=NUM_BLOCKS, block_bytes=self.block_bytes, block_size=BLOCK_SIZE)
        self.may_unmap = True
        self.ranks: Any = SimpleNamespace(
            make_ready=lambda: self.calls.append("make_ready"),
            attach=lambda attachment: self._attach(),
            detach=self.detach,
            stop=lambda: self.calls.append("stop"),
            lost="",
            fault=None,
        )

    async def open(self) -> KvMemory:
        session: Any = SimpleNamespace(
            pool=self.pool,
            ttl_ms=30,
            attach_point=("path", "token"),
            attach=self.attach_first,
            renew=self.renew,
            disconnect=lambda: self.calls.append("disconnect"),
            close=self.close,
        )

        async def open_session(*parts: object, **more: object) -> Any:
            return session

        client: Any = SimpleNamespace(open_session=open_session)
        return await open_memory(client, self.model, self.config, ranks=self.ranks)

    def detach(self) -> bool:
        self.calls.append("detach")
        return self.may_unmap

    async def attach_first(self, *, step_lane: bool) -> Arena:
        return Arena(NUM_BLOCKS * self.block_bytes)

    async def renew(self, *parts: object) -> None:
        self.is_renewed.set()

    async def close(self, *, drained: bool = True) -> None:
        self.calls.append("drained" if drained else "viewed")


async def test_the_lease_is_renewed_while_the_other_ranks_attach() -> None:
    """They pin their shares of the host tier, which takes longer than a lease where it is large."""

    def attach() -> None:
        assert world.is_renewed.wait(DEADLINE), "the lease ends meanwhile"

    world = World(attach)
    assert (await world.open()).lease.is_certain
    assert world.calls == ["make_ready"]


async def test_a_rank_that_is_refused_leaves_nothing_mapped() -> None:
    def attach() -> None:
        raise RankRefused({"code": "ABORTED", "reason": "UNKNOWN_TOKEN", "message": "a test"})

    world = World(attach)
    with pytest.raises(KvkeeperError, match="a test"):
        await world.open()
    assert world.calls == ["make_ready", "detach", "disconnect", "drained"]


async def test_the_memory_of_a_lost_device_stays_mapped_until_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_errors, "_kept", [])
    world = World(lambda: None)
    memory = await world.open()
    await memory.close(is_lost=True)
    assert world.calls == ["make_ready", "stop", "disconnect", "viewed"], "the other ranks end, and nothing is drained"
    arena = weakref.ref(memory._arena)
    del memory
    gc.collect()
    assert arena() is not None


async def test_a_session_is_not_drained_while_another_rank_cannot_end() -> None:
    """As one may not that depends on its device, whatever kills it."""
    world = World(lambda: None)
    memory = await world.open()
    world.may_unmap = False
    await memory.close()
    assert world.calls == ["make_ready", "detach", "disconnect", "viewed"]


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("cudaErrorIllegalAddress", ["stop", "disconnect", "viewed"]),
        ("cudaErrorMemoryAllocation", ["detach", "disconnect", "drained"]),
    ],
)
@pytest.mark.parametrize("in_warm_up", [False, True], ids=["attach", "warm-up"])
async def test_a_rank_whose_device_fails_while_the_session_is_opened_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, calls: list[str], in_warm_up: bool
) -> None:
    monkeypatch.setattr(device_errors, "_kept", [])
    told = ReportedFault(DeviceFault(name, where="rank 1 on cuda:1"))

    def fail(*parts: object) -> None:
        raise told

    world = World((lambda: None) if in_warm_up else fail)
    world.model = dataclasses.replace(world.model, make_ready=fail if in_warm_up else None)
    with pytest.raises(ReportedFault) as failed:
        await world.open()
    assert failed.value is told
    assert world.calls == ["make_ready", *calls], "what a lost device may write stays mapped, and the other ranks end"


async def test_a_rank_that_is_killed_in_the_warm_up_ends_the_session_alone() -> None:
    def fail(*parts: object) -> None:
        raise RankLost("rank 1: its process ended with -9")

    world = World(lambda: None)
    world.model = dataclasses.replace(world.model, make_ready=fail)
    with pytest.raises(KvkeeperError, match="rank 1: its process ended with -9") as failed:
        await world.open()
    assert failed.value.reason == "RANK_LOST"


async def test_the_work_that_fails_says_more_than_the_renewal_that_fails_meanwhile() -> None:
    """Where the first rank's device fails in the warm-up, the others are ended, so that the lease is renewed no more."""
    is_noticed = threading.Event()

    class Ended:
        def __getattr__(self, name: str) -> Any:
            return lambda *parts: None

        @property
        def lost(self) -> str:
            is_noticed.set()
            return "no rank runs"

        fault = None

    def fail(*parts: object) -> None:
        assert is_noticed.wait(DEADLINE)
        raise out_of_memory()

    world = World(lambda: None)
    world.ranks, world.model = Ended(), dataclasses.replace(world.model, make_ready=fail)
    with pytest.raises(torch.OutOfMemoryError):
        await world.open()


async def test_a_session_whose_rank_has_lost_its_device_is_no_lost_session() -> None:
    world = World(lambda: None)
    memory = await world.open()
    world.ranks.lost = "rank 1: a test"
    with pytest.raises(KvkeeperError, match="rank 1: a test"):
        await memory.require_lease()
    world.ranks.fault = DeviceFault("cudaErrorAssert", where="rank 1 on cuda:1")
    with pytest.raises(ReportedFault, match=r"^rank 1 on cuda:1: cudaErrorAssert: "):
        await memory.require_lease()
