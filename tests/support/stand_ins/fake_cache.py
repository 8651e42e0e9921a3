"""A cache service that follows a script: for the faults that a real one does not show on demand.

It sees and answers raw bytes, so that a test can compare what a repeat sent with what was sent first. Each call takes
the next entry of the script of its method: a message is the answer, a Refusal the status, SILENCE no answer at all.
HANG_UP ends a stream in good order instead of an answer, LEAVE after one.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvkeeper.cache.v1 import cache_service_pb2 as pb


class Fault(Enum):
    SILENCE = "silence"
    HANG_UP = "hang up"
    LEAVE = "leave"


@dataclass(frozen=True)
class Refusal:
    """A status with an ErrorInfo, and a RetryInfo where retry_ms says so."""

    code: grpc.StatusCode
    reason: str = ""
    message: str = "no"
    metadata: dict[str, str] = field(default_factory=dict)
    retry_ms: int | None = None

    def status(self) -> Any:
        details = []
        if self.reason:
            details.append(_packed(error_details_pb2.ErrorInfo(reason=self.reason, domain="kvkeeper", metadata=self.metadata)))
        if self.retry_ms is not None:
            delay = duration_pb2.Duration(nanos=self.retry_ms * 1_000_000)
            details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        return rpc_status.to_status(status_pb2.Status(code=self.code.value[0], message=self.message, details=details))


class FakeCache:
    """requests holds what came, per method; num_cancelled counts calls that lost their client before the answer."""

    def __init__(self) -> None:
        self.script: dict[str, list[Message | Refusal | Fault]] = defaultdict(list)
        self.requests: dict[str, list[bytes]] = defaultdict(list)
        self.num_streams = 0
        self.num_cancelled = 0
        self.waits = asyncio.Event()  # set when a call meets SILENCE
        self.cancelled = asyncio.Event()
        self.target = ""

    async def _answer(self, method: str, request: bytes, context: Any) -> bytes | None:
        self.requests[method].append(request)
        entry = self.script[method].pop(0)
        if isinstance(entry, Refusal):
            await context.abort_with_status(entry.status())
        if entry is Fault.SILENCE:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                self.cancelled.set()
                raise
        return None if entry is Fault.HANG_UP else entry.SerializeToString()

    def _unary(self, method: str) -> Any:
        async def handle(request: bytes, context: Any) -> bytes | None:
            return await self._answer(method, request, context)

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _stream_steps(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.num_streams += 1
        async for request in requests:
            answer = await self._answer("StreamSteps", request, context)
            if answer is None:
                return
            yield answer
            if self.script["StreamSteps"][:1] == [Fault.LEAVE]:
                self.script["StreamSteps"].pop(0)
                return

    async def _read_kv(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        while self.script["ReadKv"]:
            answer = await self._answer("ReadKv", request, context)
            if answer is None:
                return
            yield answer

    def handler(self) -> Any:
        names = [method.name for method in pb.DESCRIPTOR.services_by_name["CacheService"].methods]
        handlers = {name: self._unary(name) for name in names}
        handlers["StreamSteps"] = grpc.stream_stream_rpc_method_handler(self._stream_steps)
        handlers["ReadKv"] = grpc.unary_stream_rpc_method_handler(self._read_kv)
        return grpc.method_handlers_generic_handler("kvkeeper.cache.v1.CacheService", handlers)


@asynccontextmanager
async def serving(fake: FakeCache) -> AsyncIterator[FakeCache]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((fake.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    fake.target = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
