"""The least a service could do: a bare stream echo of the cache service's kind, with replies of a given size.

Run as `python -m tests.benchmarks.echo_server unix:/path`; prints "ready" and serves until its standard input closes.
"""

import asyncio
import sys
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

METHOD = "/bench.Echo/Stream"
SIZE_KEY = "reply-size"


async def _stream(_: Any, context: grpc.aio.ServicerContext) -> None:
    metadata = dict(context.invocation_metadata() or ())
    reply = bytes(int(metadata[SIZE_KEY]))
    while await context.read() is not EOF:
        await context.write(reply)


async def _serve(address: str) -> None:
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(_stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Stream": handler}),))
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
