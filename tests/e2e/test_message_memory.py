"""What messages take in the engine's process while they come: little for a bomb, and a bounded number at once of large ones."""

import asyncio
import os
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kvkeeper.client.errors import to_error
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from tests.support.processes.fleet import DEADLINE_S, Fleet, fleet

pytestmark = pytest.mark.in_turn

MESSAGE_BYTES = 4 << 20
RECEIVE_BYTES = 8 << 20  # two messages at once
ANY_SIZE = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def peak_bytes(services: Fleet) -> int:
    """The most memory that the engine has had so far."""
    status = Path(f"/proc/{services.engines[0].process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


async def ends(calls: list[object]) -> list[str]:
    """The reason of each call's refusal, or the code where there is no reason."""
    found = []
    for error in await asyncio.gather(*calls, return_exceptions=True):  # type: ignore[call-overload]
        assert isinstance(error, grpc.aio.AioRpcError), error
        told = to_error(error)
        found.append(told.reason or told.code.name)
    return found


async def test_a_bomb_is_refused_packed_as_it_is() -> None:
    async with fleet(1, {"num_blocks": 64}) as services:
        address = services.engine_addresses[0]
        unpacked = b"\0" * (256 << 20)
        async with grpc.aio.insecure_channel(address, ANY_SIZE, grpc.Compression.Gzip) as channel:
            call = channel.unary_unary("/kvkeeper.engine.v1.EngineService/Tokenize")
            assert await ends([call(b"\0", timeout=DEADLINE_S)]) == ["UNIMPLEMENTED"], "a small one, which loads what is needed"
            before = peak_bytes(services)
            assert await ends([call(unpacked, timeout=DEADLINE_S)]) == ["UNIMPLEMENTED"]
        assert peak_bytes(services) - before < 2 * MESSAGE_BYTES
        async with grpc.aio.insecure_channel(address, ANY_SIZE) as channel:
            call = channel.unary_unary("/kvkeeper.engine.v1.EngineService/Tokenize")
            assert await ends([call(unpacked, timeout=DEADLINE_S)]) == ["INVALID_FIELD"], "its head says how large it is"
        assert peak_bytes(services) - before < 2 * MESSAGE_BYTES


@pytest.mark.parametrize("method", ["SubmitRequest", "Generate", "Tokenize", "GetStats"])
async def test_many_large_messages_come_a_few_at_a_time(method: str) -> None:
    async with fleet(1, {"num_blocks": 64}, receive_memory=RECEIVE_BYTES) as services:
        text = os.urandom(MESSAGE_BYTES // 2 - 100).hex()
        prompt = pb.GenerateRequest(request_id="x", text=text)
        message = {
            "SubmitRequest": pb.SubmitRequestRequest(request=prompt),
            "Generate": prompt,
            "Tokenize": pb.TokenizeRequest(text=text),
            "GetStats": pb.TokenizeRequest(text=text),  # another message, of which the size alone counts
        }[method].SerializeToString()
        async with grpc.aio.insecure_channel(services.engine_addresses[0], ANY_SIZE) as channel:
            call = channel.stream_stream(f"/kvkeeper.engine.v1.EngineService/{method}")

            async def ask() -> None:
                async for _ in call(iter([message]), timeout=DEADLINE_S):
                    pass

            assert await ends([ask()]) == ["INVALID_FIELD"]
            before = peak_bytes(services)
            assert set(await ends([ask() for _ in range(40)])) == {"INVALID_FIELD"}, "each of them came"
        # Of 160 MiB: what may come at once, each as bytes, parsed, and while it is taken apart.
        assert peak_bytes(services) - before < 6 * RECEIVE_BYTES
