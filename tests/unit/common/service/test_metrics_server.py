"""The metrics port is bounded: a connection without a request takes no thread, not much time and none of another's room."""

import asyncio
import contextlib
import threading
import urllib.request
from collections.abc import AsyncIterator

import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from kvkeeper.common.service import metrics
from kvkeeper.common.service.metrics import MAX_CONNECTIONS, MetricsServer

DEADLINE_S = 30.0
HALF = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"


def large() -> list[Metric]:
    """An answer that no socket's buffers hold."""
    family = GaugeMetricFamily("kvkeeper_test", "x", labels=["name"])
    for number in range(20_000):
        family.add_metric([f"{number:0600}"], 1.0)
    return [family]


@pytest.fixture
async def server() -> AsyncIterator[MetricsServer]:
    served = await MetricsServer.open("127.0.0.1:0", lambda: [GaugeMetricFamily("kvkeeper_test", "x", 7.0)])
    yield served
    await served.stop()


async def connect(server: MetricsServer, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Once the other end is. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            return not await reader.read()
        except ConnectionError:
            return True


async def scrape(server: MetricsServer) -> str:
    def fetch() -> str:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=DEADLINE_S) as answer:
            return answer.read().decode()

    return await asyncio.to_thread(fetch)


async def test_half_sent_requests_take_no_thread_and_the_oldest_make_room(server: MetricsServer) -> None:
    assert "kvkeeper_test 7.0" in await scrape(server)
    num_threads = threading.active_count()
    half_sent = [await connect(server, HALF) for _ in range(3 * MAX_CONNECTIONS)]
    assert "kvkeeper_test 7.0" in await scrape(server)
    assert threading.active_count() <= num_threads
    assert len(server._tasks) <= MAX_CONNECTIONS
    for reader, writer in half_sent[: 2 * MAX_CONNECTIONS + 1]:
        assert await is_closed(reader)
        writer.close()
    reader, writer = half_sent[-1]
    writer.write(b"\r\n")
    async with asyncio.timeout(DEADLINE_S):
        assert b"kvkeeper_test 7.0" in await reader.read()
    for _, writer in half_sent:
        writer.close()


@pytest.mark.parametrize("sent", [b"", HALF, b"GET"])
async def test_a_request_that_does_not_come_is_ended_in_time(
    server: MetricsServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_TIMEOUT_S", 0.05)
    reader, writer = await connect(server, sent)
    assert await is_closed(reader)
    writer.close()


@pytest.mark.parametrize("sent", [b"GET /" + b"x" * (1 << 20), b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000])
async def test_a_request_that_is_too_long_is_not_read_to_its_end(server: MetricsServer, sent: bytes) -> None:
    reader, writer = await connect(server, sent)
    assert await is_closed(reader)
    writer.close()


async def test_an_answer_that_is_not_taken_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await MetricsServer.open("127.0.0.1:0", large)
    whole = await scrape(server)
    monkeypatch.setattr(metrics, "_TIMEOUT_S", 0.2)
    reader, writer = await connect(server, HALF + b"\r\n")
    await asyncio.wait_for(asyncio.gather(*server._tasks), DEADLINE_S)
    assert not server._tasks
    monkeypatch.undo()
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < len(whole)
    writer.close()
    await server.stop()


async def test_what_was_asked_is_answered_before_the_end() -> None:
    begun = asyncio.Event()

    def collect() -> list[Metric]:
        begun.set()
        return [GaugeMetricFamily("kvkeeper_test", "x", 7.0)]

    server = await MetricsServer.open("127.0.0.1:0", collect)
    asked, waiting = await connect(server, HALF + b"\r\n"), await connect(server, HALF)
    async with asyncio.timeout(DEADLINE_S):
        await begun.wait()
        await server.stop()
        assert b"kvkeeper_test 7.0" in await asked[0].read()
    assert await is_closed(waiting[0])
    for _, writer in (asked, waiting):
        writer.close()
