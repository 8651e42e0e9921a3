"""Several nodes on loopback behind one real gateway: each node a cache service and an engine with the demo model.

Owns the processes and their addresses; a node that was killed is started again at the same ones. Rule: everything is waited
for by what a process says of itself, nothing by time.
"""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from kvkeeper.cli.start import gateway
from kvkeeper.cli.start.http import until_serving
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.fleet import DEADLINE_S, Fleet
from tests.support.processes.services import environment, free_ports, short_folder

BLOCK_SIZE = 16
_POLL_S = 0.05  # between two questions to another process


class Node:
    """One of them. Its engine listens where the gateway looks for it."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        folder.mkdir()
        self.address, _ = free_ports()
        self._fleet = Fleet(
            folder,
            1,
            {"num_blocks": num_blocks},
            {"model": DEMO_MODEL_DIR, "block_size": BLOCK_SIZE, "token_budget": 512, "chunk_size": 512, "gateway": "on"},
        )
        self._fleet.engine_addresses = [self.address]

    async def start(self) -> None:
        """Both services, until they serve."""
        await self._fleet.start()

    async def kill(self) -> None:
        """Both at once, as when the machine is lost."""
        services = (self._fleet.engines[0], self._fleet.cache)
        for service in services:
            service.process.kill()
        await asyncio.gather(*(service.end() for service in services))

    async def restart_cache(self) -> None:
        """Its cache service is killed and serves again, with nothing cached. The engine stays."""
        await self._fleet.cache.kill()
        await self._fleet.start_cache()

    async def close(self) -> None:
        await self._fleet.close()

    async def num_cached_tokens(self) -> int:
        """Of the prompts that its engine has had so far."""
        return int((await self._stats()).num_cached_tokens)

    async def num_completed(self) -> int:
        """Requests that its engine has completed."""
        return int((await self._stats()).num_completed_requests)

    async def num_blocks_known(self) -> int:
        """Blocks that its cache service tells its watches of, if it is watched; else -1."""
        async with AsyncCacheClient(self._fleet.cache_address) as client:
            pools = (await client.stats()).pools
        if not pools or not pools[0].num_watches:
            return -1
        return int(pools[0].num_indexed_blocks - pools[0].num_partial_nodes)  # no event names a partial node

    async def _stats(self) -> Any:
        async with AsyncEngineClient(self.address, CallOptions(retry_s=0)) as client:
            return await client.stats()


class Nodes:
    """The nodes and the gateway. http: where clients find it, as a base URL."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._address, self._metrics = free_ports()
        self.base_url = f"http://{self._address}/v1"
        self.model = DEMO_MODEL_DIR.name
        self._process: asyncio.subprocess.Process | None = None

    async def start_gateway(self, folder: Path, flags: Sequence[str]) -> None:
        """Until it serves from all nodes, and knows what they have cached."""
        first, *others = self.nodes
        typed = ["--worker-urls", *(f"grpc://{node.address}" for node in others)] if others else []
        typed += ["--prometheus-port", self._metrics.rpartition(":")[2], "--log-level", "warn", *flags]
        log = (folder / "gateway.log").open("w")
        with log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "smg", "launch", *gateway.flags(self._address, first.address, typed)),
                env=environment(folder), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        await until(self.num_healthy, len(self.nodes))
        async with asyncio.timeout(DEADLINE_S):
            await until_serving(self._address, gateway.PROBE)

    async def stop_gateway(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def num_healthy(self) -> int:
        """Nodes that the gateway sends requests to."""
        if self._process is None or self._process.returncode is not None:
            raise RuntimeError("the gateway has ended")
        try:
            workers = json.loads(await _page(f"http://{self._address}/workers"))["workers"]
        except (OSError, ValueError, KeyError):
            return 0
        return sum(bool(worker["is_healthy"]) for worker in workers)

    async def metric(self, name: str) -> float:
        """The sum of a metric of the gateway over its labels."""
        text = await _page(f"http://{self._metrics}/metrics")
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


async def _page(url: str) -> str:
    def read() -> str:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return str(answer.read(), "utf-8")

    return await asyncio.to_thread(read)


async def until(ask: Callable[[], Any], expected: Any) -> None:
    """Until the answer is the expected one. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        while await ask() != expected:  # noqa: ASYNC110  what is waited for is in another process
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def nodes(count: int, *gateway_flags: str, num_blocks: int = 800) -> AsyncIterator[Nodes]:
    """num_blocks: of the pool of each. Serves when the block begins; a failure in it is told with the gateway's log."""
    with short_folder() as folder:
        found = Nodes([Node(folder / str(number), num_blocks) for number in range(count)])
        async with AsyncExitStack() as stack:
            for node in found.nodes:
                stack.push_async_callback(node.close)
            stack.push_async_callback(found.stop_gateway)
            await asyncio.gather(*(node.start() for node in found.nodes))
            try:
                await found.start_gateway(folder, gateway_flags)
                yield found
            except Exception as error:
                error.add_note((folder / "gateway.log").read_text()[-4000:])
                raise
