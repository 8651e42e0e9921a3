"""A TCP proxy that cuts connections: for calls that are carried out but lose their answer on the way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CutProxy:
    """Passes bytes both ways. While is_holding, answers are swallowed; cut() breaks every connection."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_holding = False
        self.address = ""

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers |= {writer, server_writer}
        await asyncio.gather(
            self._pump(reader, server_writer, is_answer=False), self._pump(server_reader, writer, is_answer=True)
        )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if not (is_answer and self.is_holding):
                    writer.write(data)
                    await writer.drain()
        writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def cutting(target: str) -> AsyncIterator[CutProxy]:
    proxy = CutProxy(target)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await server.wait_closed()
