"""A log that cannot be written, or that nobody reads: services, fronts, ranks, text workers and `up` go on, and count.

Real processes, whose outputs both are broken from their start on, or stand still.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.show.readiness import until_serving
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions, Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.broken_outputs import BROKEN, full_disk, unread
from tests.support.processes.fleet import DEADLINE_S
from tests.support.processes.service_pair import generate
from tests.support.processes.services import short_folder, sockets_in
from tests.support.processes.unread_services import UnreadServices, start, unread_services
from tests.support.slices import todays
from tests.support.worlds.cache_api import SPEC

NUM_SESSIONS = 70  # more than there may be at once
UNREAD = "unread"
DEMO = ("--model", str(DEMO_MODEL_DIR), "--fronts", "1", "--threads", "1")
LONG = "import os\n" * 400  # more than an engine encodes itself
TODAYS = todays([*BROKEN, UNREAD], 2)


def children(process: int, word: str) -> list[int]:
    """Processes below this one whose command line has the word."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in path.read_text().split():
            if word in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


async def ask_for_all(services: UnreadServices) -> None:
    """Calls of each kind that have a line in a log."""
    for number in range(NUM_SESSIONS):
        session = await services.cache_client.open_session(SPEC, pb.EXECUTOR_CACHE, client_name=f"s{number}")
        await session.close()
    client = services.engine_client
    assert (await generate(client, "def main():", max_tokens=4)).reasons == ["length"]
    assert (await generate(client, LONG, max_tokens=4)).reasons == ["length"], "encoded by a text worker"
    spelled = await generate(client, "One or two: ", 4, Sampling(temperature=0, choices=("one", "two")))
    assert spelled.texts[0] in ("one", "two"), "tried out by a text worker"


@pytest.mark.parametrize("kind", TODAYS)
async def test_services_serve_on_and_count(kind: str) -> None:
    reading, writing = unread() if kind == UNREAD else (None, BROKEN[kind]())
    async with unread_services(writing, DEMO) as services:
        await ask_for_all(services)
        (front,) = children(services.engine.pid, "kvkeeper.engine_service.serving.front_main")
        os.kill(front, signal.SIGKILL)  # another is started, and the log would say so
        await asyncio.wait_for(until_serving(f"unix:{services.folder}/engine"), DEADLINE_S)
        async with AsyncEngineClient(f"unix:{services.folder}/engine", CallOptions(timeout_s=DEADLINE_S)) as client:
            assert (await generate(client, "def main():", max_tokens=4)).reasons == ["length"]
            num_dropped = (await client.stats()).num_dropped_log_lines
        stats = await services.cache_client.stats()
        assert (stats.num_opened_sessions, len(stats.sessions)) == (NUM_SESSIONS + 1, 1)
        if kind == UNREAD:
            assert (num_dropped, stats.num_dropped_log_lines) == (0, 0), "little waits, and may still be read"
        else:
            assert num_dropped > 0
            assert stats.num_dropped_log_lines >= 2 * NUM_SESSIONS
        if reading is not None:
            lines = asyncio.create_task(asyncio.to_thread(read_all, reading))
        assert await services.end() == [0, 0]
    os.close(writing)
    if reading is not None:
        told = [(line["service"], line["event"]) for line in await lines]
        assert told.count(("cache", "session_opened")) == NUM_SESSIONS + 1
        assert told.count(("engine", "request_ended")) == 4
        assert ("engine", "front_ended") in told
        for service in ("cache", "engine"):
            of_one = [event for name, event in told if name == service]
            assert "ready" in of_one
            assert of_one[-1] == "stopped"


def read_all(reading: int) -> list[dict[str, object]]:
    """Lines of the log until all writers have ended."""
    with os.fdopen(reading, "rb") as lines:
        return [json.loads(line) for line in lines if not line.startswith(b"-")]


async def test_services_that_nobody_reads_end_when_they_are_asked_to() -> None:
    reading, writing = unread()
    async with unread_services(writing, ("--model", "hash-toy", "--block-size", "4", "--fronts", "1")) as services:
        assert (await generate(services.engine_client, [3, 4, 5])).reasons == ["length"]
        assert await services.end() == [0, 0]
    for end in (reading, writing):
        os.close(end)


async def test_ranks_are_lost_and_started_again_without_a_log() -> None:
    writing = full_disk()
    flags = ("--model", "hash-toy", "--block-size", "4", "--fronts", "0", "--tensor-parallel", "2")
    async with unread_services(writing, flags) as services:
        assert (await generate(services.engine_client, [3, 4, 5])).reasons == ["length"]
        (rank,) = children(services.engine.pid, "rank_process")
        os.kill(rank, signal.SIGKILL)
        patient = CallOptions(timeout_s=DEADLINE_S, retry_s=DEADLINE_S)  # until the ranks are there again
        async with AsyncEngineClient(f"unix:{services.folder}/engine", patient) as client:
            assert (await generate(client, [3, 4, 6])).reasons == ["length"]
        assert (await services.engine_client.stats()).num_dropped_log_lines > 0
        assert await services.end() == [0, 0]
    os.close(writing)


@pytest.mark.parametrize("kind", TODAYS)
async def test_up_keeps_both_services_without_a_log(kind: str) -> None:
    """It has something to say when one has died, and when it ends."""
    async with up_on(kind, own_output=asyncio.subprocess.PIPE) as (up, cache, engine):
        assert up.stdout is not None
        assert json.loads(await asyncio.wait_for(up.stdout.readline(), DEADLINE_S))["ready"]
        (first,) = children(up.pid, "engine")
        os.kill(first, signal.SIGKILL)
        async with AsyncCacheClient(cache, CallOptions(timeout_s=DEADLINE_S)) as client, asyncio.timeout(DEADLINE_S):
            while (await client.stats()).num_opened_sessions < 2:  # noqa: ASYNC110  in another process
                await asyncio.sleep(0.05)
        await asyncio.wait_for(until_serving(engine), DEADLINE_S)
        await serves_and_ends(up, engine)


@pytest.mark.parametrize("kind", ["full", UNREAD])
async def test_up_that_cannot_say_that_it_is_ready_goes_on(kind: str) -> None:
    async with up_on(kind) as (up, _, engine):
        await asyncio.wait_for(until_serving(engine), DEADLINE_S)
        await serves_and_ends(up, engine)


@asynccontextmanager
async def up_on(kind: str, own_output: int | None = None) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """`kvkeeper up` with such outputs; the addresses of the cache service and of the engine service."""
    reading, writing = unread() if kind == UNREAD else (None, BROKEN[kind]())
    with short_folder() as folder:
        cache, engine = sockets_in(folder)
        flags = ("up", "--json", "--cache-listen", cache, "--engine-listen", engine, "--pool-memory", "32MiB")
        up = await start("kvkeeper.cli", writing, folder, *flags, output=own_output)
        try:
            yield up, cache, engine
        finally:
            if up.returncode is None:
                up.kill()
            await up.wait()
            up._transport.close()  # type: ignore[attr-defined]  # its pipe would close after the loop
            for end in (reading, writing):
                if end is not None:
                    os.close(end)


async def serves_and_ends(up: asyncio.subprocess.Process, engine: str) -> None:
    async with AsyncEngineClient(engine, CallOptions(timeout_s=DEADLINE_S)) as client:
        assert (await generate(client, "def main():", max_tokens=4)).reasons == ["length"]
    up.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(up.wait(), DEADLINE_S) == 128 + signal.SIGTERM
