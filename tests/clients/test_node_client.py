"""Runs the Node client's own tests against real services."""

import asyncio
import os
import shutil
from pathlib import Path

from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.server import RunningServer, start_server
from tests.support.processes.node_package import NODE_CLIENT


async def run_node(test: str, **variables: str) -> None:
    node = shutil.which("node")
    assert node is not None, "the Node client's test needs Node 18 or newer on the PATH"
    assert (NODE_CLIENT / "node_modules").is_dir(), "run `npm ci` in clients/node first (make test does)"
    process = await asyncio.create_subprocess_exec(
        *(node, "--test", f"test/{test}"),
        cwd=NODE_CLIENT,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    text = output.decode()
    assert process.returncode == 0, text
    assert "# skipped 0" in text, text


async def test_a_sequence_lives_through_the_node_client(cache_server: RunningServer) -> None:
    await run_node("cache.test.js", KVKEEPER_CACHE_LISTEN=cache_server.address)


async def test_everything_else_goes_through_the_node_client(folder: Path) -> None:
    config = CacheConfig(
        listen=f"unix:{folder}/s", runtime_dir=folder / "run", pool_memory=1 << 20, logits_memory=1 << 12, drain_timeout=0
    )
    server = await start_server(config)
    try:
        await run_node("calls.test.js", KVKEEPER_CACHE_LISTEN=server.address)
    finally:
        await server.stop()
