"""Frames of HTTP/2 without a pause, from clients without credentials: others are served meanwhile, and memory is bounded."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.processes.fleet import DEADLINE_S
from tests.support.processes.flooded import SERVERS, Flooded, flooded

NUM_CONNECTIONS = 8
NUM_ASKED = 3
NUM_RESETS = 60_000  # that would take 700 MB, were each kept
NUM_PINGS = 10_000
MOST_MB = 64


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.in_turn]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[Flooded]:
    async with flooded() as found:
        yield found


@pytest.mark.parametrize("kind", ["settings", "continuations", "resets"])
@pytest.mark.parametrize("server", SERVERS)
async def test_requests_are_answered_while_frames_come_without_a_pause(world: Flooded, server: str, kind: str) -> None:
    """The flood goes on until they are."""
    async with world.flood(server, kind, NUM_CONNECTIONS) as flooding:
        async with asyncio.timeout(DEADLINE_S / 2):
            for _ in range(NUM_ASKED):
                await world.ask()
        assert not flooding.done(), "the flood was over before"


@pytest.mark.parametrize("server", SERVERS)
async def test_calls_that_the_client_ends_are_not_kept(world: Flooded, server: str) -> None:
    before = world.memory_mb()
    async with world.flood(server, "resets", 1, num_frames=NUM_RESETS) as flooding:
        most = await world.most_memory_mb(flooding)
        ((sent, _),) = flooding.result()
    assert sent == NUM_RESETS
    assert most - before < MOST_MB
    await world.ask()


@pytest.mark.parametrize("server", SERVERS)
async def test_a_connection_that_only_pings_is_sent_away(world: Flooded, server: str) -> None:
    async with world.flood(server, "pings", NUM_CONNECTIONS, num_frames=NUM_PINGS) as flooding:
        assert all(is_refused for _, is_refused in await flooding)
    await world.ask()
