"""Pools on a device outlive the cache service: real processes, killed with SIGKILL, on stand-ins of CUDA made of memfds.

What a device adds to it has run on none: see docs/start/status.md. The stand-ins keep the rules of the driver that matter here.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.common.hold.client import HolderClient
from tests.support.processes.fleet import DEADLINE_S, Service
from tests.support.processes.service_pair import until
from tests.support.processes.services import environment, short_folder
from tests.support.slices import todays
from tests.support.stand_ins.fake_libcuda import GRANULARITY, num_device_memories
from tests.support.worlds.cache_api import BLOCK_BYTES, Api, Session, kv_of, read_all, refusal
from tests.support.worlds.memory_folder import memory_folder

pytestmark = pytest.mark.in_turn

NUM_BLOCKS = 33
NUM_TOKENS = 18  # of each prompt: four whole blocks and two tokens
NUM_PROMPTS = 3


class World:
    """A holder, a cache service on a device, and processes that map its pools."""

    def __init__(self, folder: Path, memory: Path) -> None:
        self.folder, self.memory = folder, memory
        self.address, self.hold = f"unix:{folder}/cache", f"unix:{folder}/hold/sock"
        self.cache: Service
        self.holder: Service
        self._all: list[Service] = []

    async def start_holder(self, *flags: str) -> None:
        self.holder = await self._spawn("kvkeeper.common.hold", "--listen", self.hold, *flags)
        await self.holder.until("ready")

    async def start_cache(self, *switches: str, **flags: Any) -> None:
        self.cache = await self.spawn_cache(*switches, **flags)
        await self.cache.until("ready")

    async def spawn_cache(self, *switches: str, **flags: Any) -> Service:
        device = flags.pop("uuid", "")
        given: dict[str, Any] = {
            "listen": self.address, "runtime_dir": self.folder / "run", "device": "cuda", "hold": self.hold,
            "memory_dir": self.memory, "num_blocks": NUM_BLOCKS, "num_pools": 1, "drain_timeout": 0,
        } | flags  # fmt: skip
        words = [w for name, value in given.items() if value for w in ("--" + name.replace("_", "-"), str(value))]
        module = ("tests.support.processes.cuda_process", str(self.folder), "cache")
        return await self._spawn(*module, *words, *switches, **({"KVKEEPER_TEST_DEVICE": device} if device else {}))

    async def _spawn(self, *words: str, **variables: str) -> Service:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *words, env=environment(self.folder) | variables,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._all.append(service := Service(process))
        return service

    @asynccontextmanager
    async def mapper(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """A process that maps the pool."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.processes.cuda_process", str(self.folder), "map", self.address,
            env=environment(self.folder), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert await told(process) == "attached"
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            assert process.stdin is not None
            process.stdin.close()

    @asynccontextmanager
    async def api(self) -> AsyncIterator[Api]:
        async with grpc.aio.insecure_channel(self.address) as channel:
            await channel.channel_ready()
            api = Api(None, channel)
            yield api
            await api.audit()

    def held(self) -> dict[str, int]:
        with HolderClient(self.hold) as client:
            return client.held()

    async def until_held(self, number: int) -> dict[str, int]:
        """Until the holder has so many descriptors."""

        async def as_many() -> tuple[dict[str, int]] | None:
            held = await asyncio.to_thread(self.held)
            return (held,) if len(held) == number else None

        return (await until(as_many))[0]

    async def close(self) -> None:
        for service in self._all:
            if service.process.returncode is None:
                service.process.kill()
            await service.end()


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """With a holder."""
    with short_folder() as folder, memory_folder() as memory:
        found = World(folder, memory)
        try:
            await found.start_holder()
            yield found
        except Exception as error:
            error.add_note("\n\n".join(service.tail for service in found._all))
            raise
        finally:
            await found.close()


async def told(process: asyncio.subprocess.Process, *words: object) -> str:
    """What the mapper answers to a line."""
    assert process.stdin is not None and process.stdout is not None
    if words:
        process.stdin.write((" ".join(map(str, words)) + "\n").encode())
    async with asyncio.timeout(DEADLINE_S):
        return (await process.stdout.readline()).decode().strip()


def events(service: Service, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in service.lines if line.startswith("{")]
    return [event for event in found if event["event"] == name]


def num_restored(service: Service) -> int:
    (event,) = events(service, "pool_restored")
    assert event["num_dropped_blocks"] == 0
    return int(event["num_blocks"])


def first_token(prompt: int) -> int:
    return 1000 * (prompt + 1)


async def fill(api: Api) -> None:
    """Caches all prompts, each with K and V of its own. Returns when it is written down."""
    session = await api.open(engine=False)
    await fill_in(session)
    await session.call("CloseSession", drained=True)
    assert (await api.stats()).pools[0].num_cached_blocks == NUM_PROMPTS * (NUM_TOKENS // 4)


async def fill_in(session: Session) -> None:
    for prompt in range(NUM_PROMPTS):
        await session.compute(prompt + 1, NUM_TOKENS, kv_of(range(NUM_TOKENS), salt=prompt), first=first_token(prompt))
        await session.call("ReleaseSequence", sequence_id=prompt + 1)


async def check_hits(api: Api, *, cached: int = 16) -> None:
    """Each prompt finds so many tokens, and their K and V are what was written."""
    session = await api.open(engine=False)
    for prompt in range(NUM_PROMPTS):
        assert await session.create(prompt + 1, NUM_TOKENS, first=first_token(prompt)) == cached
        if cached:
            await session.call("ExtendSequence", sequence_id=prompt + 1, num_tokens=cached)
            content = (await read_all(session, prompt + 1))[:, :, :cached]
            np.testing.assert_array_equal(content, kv_of(range(NUM_TOKENS), salt=prompt)[:, :, :cached])
        await session.call("ReleaseSequence", sequence_id=prompt + 1)
    await session.call("CloseSession", drained=True)


@asynccontextmanager
async def filled_world() -> AsyncIterator[World]:
    """All prompts are cached, and the holder has their memory."""
    async with world() as found:
        await found.start_cache()
        async with found.api() as api:
            await fill(api)
        await found.until_held(1)
        yield found


@pytest.mark.parametrize("flags", [{}, {"num_blocks": "", "pool_memory": "64KiB", "num_pools": 2}], ids=["blocks", "bytes"])
async def test_a_cache_service_that_is_killed_again_and_again_finds_its_device_memory(flags: dict[str, Any]) -> None:
    """By number of blocks, and by an amount of memory, which is reserved at start, for another pool too."""
    async with world() as found:
        await found.start_cache(**flags)
        async with found.api() as api:
            await fill(api)
            await check_hits(api)
        (name,) = (await found.until_held(1)).items()
        assert name[1] == GRANULARITY
        for _ in range(3):
            await found.cache.kill()
            await found.start_cache(**flags)
            assert num_restored(found.cache) == NUM_PROMPTS * 4
            num_pools = flags.get("num_pools", 1)
            assert num_device_memories(found.cache.process.pid) == num_pools + 1, "one for each arena, and the link's"
            async with found.api() as api:
                await check_hits(api)
            assert dict([name]) == found.held(), "the same memory"
        assert "cuda-" not in found.cache.tail and name[0] not in "".join(found.cache.lines + found.holder.lines)


async def test_what_a_process_may_still_write_is_kept_back_until_it_is_gone() -> None:
    async with filled_world() as found:
        async with found.api() as api:
            error = await refusal(api.open(engine=False, read_only_memory=True))
            assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "read_only_memory")
        async with found.mapper() as mapper:
            place = (NUM_BLOCKS - 1) * BLOCK_BYTES
            assert await told(mapper, "read", place) == "0", "what was there before is not seen"
            assert await told(mapper, "write", place, 7) == "7"
            await found.cache.kill()
            await found.start_cache()
            (restored,) = events(found.cache, "pool_restored")
            num_other = NUM_BLOCKS - 1 - NUM_PROMPTS * 4
            assert (restored["num_blocks"], restored["num_quarantined_blocks"]) == (NUM_PROMPTS * 4, num_other)
            assert await told(mapper, "read", place) == "7"
            async with found.api() as api:
                (pool,) = (await api.stats()).pools
                assert (pool.num_free_blocks, pool.num_quarantined_blocks) == (0, num_other)
                mapper.kill()
                await found.cache.until("quarantine_ended")
                await api.until(lambda stats: stats.pools[0].num_free_blocks == num_other)
                await check_hits(api)


async def test_a_process_that_unmaps_ends_the_quarantine_and_another_that_maps_shares_the_memory() -> None:
    async with filled_world() as found:
        async with found.mapper() as before:
            await found.cache.kill()
            await found.start_cache()
            assert not found.cache.events["quarantine_ended"]
            async with found.mapper() as after:
                place = (NUM_BLOCKS - 1) * BLOCK_BYTES
                for value in (3, 4):
                    await told(before, "write", place, value)
                    assert await told(after, "read", place) == str(value)
                assert await told(before, "unmap") == "unmapped"
                await found.cache.until("quarantine_ended")


async def test_a_holder_that_dies_loses_nothing_of_a_running_pool_and_the_next_one_gets_it() -> None:
    async with world() as found:
        await found.start_cache()
        async with found.api() as api:
            await fill(api)
            await found.until_held(1)
            for count in (1, 2):
                await found.holder.kill()
                await found.cache.until("holder_away", count)
                await check_hits(api)
                await found.start_holder()
                await found.until_held(1)
        await found.cache.kill()
        await found.start_cache()
        assert num_restored(found.cache) == NUM_PROMPTS * 4
        async with found.api() as api:
            await check_hits(api)


async def test_a_pool_that_is_made_while_the_holder_is_away_is_kept_once_it_is_back() -> None:
    async with world() as found:
        await found.holder.kill()
        await found.start_cache()
        async with found.api() as api:
            await fill(api)
        await found.start_holder()
        await found.until_held(1)
        await found.cache.kill()
        await found.start_cache()
        assert num_restored(found.cache) == NUM_PROMPTS * 4


async def test_a_holder_that_is_full_is_told_once_and_the_pool_goes_on() -> None:
    async with world() as found:
        await found.holder.kill()
        await found.start_holder("--max-held", "1")
        with HolderClient(found.hold) as client:
            client.put("of-another-service", 5, sys.__stdin__.fileno())  # type: ignore[union-attr]
            await found.start_cache()
            async with found.api() as api:
                await fill(api)
                await found.cache.until("holder_refused")
                await check_hits(api)
                client.drop("of-another-service")
                await found.holder.kill()
                await found.start_holder()
                await found.until_held(1)
        refused = events(found.cache, "holder_refused")
        assert [event["why"] for event in refused] == ["FULL"]


async def test_a_start_without_the_holder_is_a_cold_one_and_says_so_in_one_line() -> None:
    async with filled_world() as found:
        await asyncio.gather(found.cache.kill(), found.holder.kill())
        await found.start_cache()
        warnings = [json.loads(line) for line in found.cache.lines if '"warning"' in line]
        assert [event["event"] for event in warnings] == ["holder_away"]
        async with found.api() as api:
            await check_hits(api, cached=0)
            await fill(api)
        await found.start_holder()
        await found.until_held(1)


async def test_memory_without_its_files_is_given_back() -> None:
    """The operator has removed the folder: what the holder has of it is of no use any more."""
    async with filled_world() as found:
        await found.cache.kill()
        for path in found.memory.iterdir():
            path.unlink()
        with HolderClient(found.hold) as client:
            client.put("of-another-service", 5, sys.__stdin__.fileno())
        await found.start_cache()
        await found.cache.until("holder_told")
        assert [event["num_dropped"] for event in events(found.cache, "holder_told")] == [1]
        assert list(found.held()) == ["of-another-service"]
        assert num_device_memories(found.holder.process.pid) == 0


@pytest.mark.parametrize("keep", [False, True])
async def test_a_clean_stop_leaves_device_memory_only_where_it_is_to_be_kept(keep: bool) -> None:
    async with world() as found:
        for run in range(2):
            await found.start_cache(*(["--keep"] if keep else []))
            async with found.api() as api:
                await check_hits(api, cached=16 if run and keep else 0)
                await fill(api) if not (run and keep) else None
            await found.until_held(1)
            found.cache.terminate()
            assert await found.cache.end() == 0
            assert len(found.held()) == keep
            assert num_device_memories(found.holder.process.pid) == keep
            assert found.memory.exists() == keep


async def test_a_service_takes_over_from_the_one_that_runs() -> None:
    async with world() as found:
        await found.start_cache("--keep")
        before = found.cache
        async with found.api() as api:
            await fill(api)
        await found.start_cache("--keep", "--take-over")
        assert await before.end() == 0
        assert num_restored(found.cache) == NUM_PROMPTS * 4
        async with found.api() as api:
            await check_hits(api)


async def test_the_host_tier_is_kept_beside_it() -> None:
    async with world() as found:
        flags = {"num_blocks": 7, "num_host_blocks": 33}
        await found.start_cache(**flags)
        async with found.api() as api:
            await fill_in(await api.open(engine=False))  # more than the pool holds, so that blocks are demoted
            stats = await api.until(lambda stats: stats.pools[0].num_cached_host_blocks >= 6)
            counts = stats.pools[0].num_cached_blocks, stats.pools[0].num_cached_host_blocks
        await found.until_held(1)
        await found.cache.kill()
        await found.start_cache(**flags)
        (restored,) = events(found.cache, "pool_restored")
        assert (restored["num_blocks"], restored["num_host_blocks"]) == counts


# Refused: each is a cold start with a line that says why, and leaves nothing at the holder


def replaced(found: World, make: Callable[[], int] | None, num_more: int = 0) -> None:
    """The pool's memory at the holder gives way to another descriptor under its name; None: to none."""
    with HolderClient(found.hold) as client:
        ((name, num_bytes),) = client.held().items()
        own = client.get(name)
        client.drop(name)
        descriptor = own.descriptor if num_more else make() if make is not None else None
        if descriptor is not None:
            client.put(name, num_bytes + num_more, descriptor)
        for each in {own.descriptor, descriptor} - {None}:
            os.close(each)


def other_memory() -> int:
    """Of the same size as the pool's."""
    descriptor = os.memfd_create("fake-device-memory")
    os.ftruncate(descriptor, GRANULARITY)
    return descriptor


def null_device() -> int:
    return os.open(os.devnull, os.O_RDWR)


DAMAGES: dict[str, Callable[[World], None]] = {
    "nothing": lambda found: None,
    "dropped": lambda found: replaced(found, None),
    "swapped": lambda found: replaced(found, other_memory),
    "no device memory": lambda found: replaced(found, null_device),
    "other size": lambda found: replaced(found, None, GRANULARITY),
}


@pytest.mark.parametrize(
    ("damage", "flags", "why"),
    todays(
        [
            ("dropped", {}, "the holder does not have its memory"),
            ("swapped", {}, "its arena is of another time"),
            ("no device memory", {}, "its memory cannot be mapped: cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE"),
            ("other size", {}, "its memory has another size"),
            ("nothing", {"uuid": "cd" * 16}, "its memory is on another device"),
            ("nothing", {"num_blocks": 17}, "the configuration has other sizes, or no place for it"),
            ("nothing", {"device": "cpu", "hold": ""}, "its memory is on a device"),
        ],
        3,
    ),
)
async def test_what_is_not_the_pools_memory_is_never_believed(damage: str, flags: dict[str, Any], why: str) -> None:
    async with filled_world() as found:
        await found.cache.kill()
        DAMAGES[damage](found)
        before = set(found.held())
        await found.start_cache(**flags)
        (refused,) = events(found.cache, "kept_memory_refused")
        assert refused["why"] == why
        if flags.get("device") != "cpu":
            await found.until_held(0)
        async with found.api() as api:
            await check_hits(api, cached=0)
            (pool,) = (await api.stats()).pools
            assert pool.num_quarantined_blocks == 0
            assert pool.pool.arena_kind == (pb.ARENA_KIND_MEMFD if flags.get("device") == "cpu" else pb.ARENA_KIND_CUDA_VMM)
        if flags.get("device") != "cpu":
            assert not before & set(await found.until_held(1)), "the new pool has a name of its own"


async def test_memory_of_the_machine_is_no_devices() -> None:
    async with world() as found:
        await found.start_cache(device="cpu", hold="")
        async with found.api() as api:
            await fill(api)
        await found.cache.kill()
        await found.start_cache()
        (refused,) = events(found.cache, "kept_memory_refused")
        assert refused["why"] == "its memory is not on a device"
        async with found.api() as api:
            await check_hits(api, cached=0)
