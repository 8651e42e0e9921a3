"""A hostile client of the engine: `python -m tests.benchmarks.attacker ADDRESS WHAT`.

Prepares, prints "ready", waits for a line, attacks until another line comes, and prints what its calls ended with as one JSON
object: calls by reason.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import count

import grpc
import grpc.aio

from kvkeeper.client.errors import to_error
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc

Attack = Callable[[pb_grpc.EngineServiceStub, int], Awaitable[None]]  # one call, the so-many-th

TEXT_BYTES = 1 << 20
_LINE = "def main(argument):\n    return 'a text that is long, naïve and 日本語' + argument[%d]\n"
_BOMB = "((a{100}){100}){100}"
_UNPACKED_BYTES = 16 << 20
_SUBMITTED_TOKENS = 64
_REFUSAL_PAUSE_S = 0.01  # a client that asks again at once would measure its own processor time


def _long_text(number: int) -> str:
    text = "".join(_LINE % (number + place) for place in range(TEXT_BYTES // (len(_LINE.encode()) + 8)))
    return text.encode()[:TEXT_BYTES].decode(errors="ignore")


async def _send_text(stub: pb_grpc.EngineServiceStub, number: int) -> None:
    request = pb.GenerateRequest(request_id=f"text-{number}", text=_long_text(number))
    await stub.SubmitRequest(pb.SubmitRequestRequest(request=request))


async def _tokenize(stub: pb_grpc.EngineServiceStub, number: int) -> None:
    await stub.Tokenize(pb.TokenizeRequest(text=_long_text(number)))


async def _fill(stub: pb_grpc.EngineServiceStub, number: int) -> None:
    """A prompt of a megabyte that fits: 32 blanks a token."""
    text = f"{number}" + " " * (TEXT_BYTES - 4096)
    sampling = pb.SamplingParams(max_tokens=1)
    async for _ in stub.Generate(pb.GenerateRequest(text=text, sampling=sampling)):
        pass


async def _bomb(stub: pb_grpc.EngineServiceStub, number: int) -> None:
    sampling = pb.SamplingParams(regex="b" * (number % 8) + _BOMB)
    async for _ in stub.Generate(pb.GenerateRequest(text="x", sampling=sampling)):
        pass


async def _constrain(stub: pb_grpc.EngineServiceStub, number: int) -> None:
    """A pattern that is taken, and costs much in each step."""
    sampling = pb.SamplingParams(
        regex=f"(.*[a-y]{{1,{20 + number % 8}}}z){{1,40}}", max_tokens=_SUBMITTED_TOKENS, temperature=1.5
    )
    async for _ in stub.Generate(pb.GenerateRequest(text="x", sampling=sampling)):
        pass


async def _unpack(stub: pb_grpc.EngineServiceStub, number: int) -> None:
    del number
    await stub.Tokenize(pb.TokenizeRequest(text=" " * _UNPACKED_BYTES))


async def _submit(stub: pb_grpc.EngineServiceStub, number: int) -> None:
    sampling = pb.SamplingParams(max_tokens=_SUBMITTED_TOKENS, ignore_eos=True)
    request = pb.GenerateRequest(request_id=f"submit-{number}", text=f"# {number}\n", sampling=sampling)
    await stub.SubmitRequest(pb.SubmitRequestRequest(request=request))


# What: a call, how many at once, and how gRPC packs them.
ATTACKS: dict[str, tuple[Attack, int, grpc.Compression]] = {
    "texts": (_send_text, 16, grpc.Compression.NoCompression),
    "tokenize": (_tokenize, 16, grpc.Compression.NoCompression),
    "prompts": (_fill, 8, grpc.Compression.NoCompression),
    "regex": (_bomb, 32, grpc.Compression.NoCompression),
    "constraints": (_constrain, 16, grpc.Compression.NoCompression),
    "gzip": (_unpack, 4, grpc.Compression.Gzip),
    "submits": (_submit, 1500, grpc.Compression.NoCompression),
}


async def _main(address: str, what: str) -> None:
    attack, num_at_once, compression = ATTACKS[what]
    ends, numbers, loop = Counter[str](), count(time.time_ns() // 1000), asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(address, [("grpc.max_send_message_length", -1)], compression) as channel:
        stub = pb_grpc.EngineServiceStub(channel)
        await channel.channel_ready()
        print("ready", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        calls = [asyncio.create_task(_repeat(attack, stub, numbers, ends)) for _ in range(num_at_once)]
        await loop.run_in_executor(None, sys.stdin.readline)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    print(json.dumps(ends), flush=True)


async def _repeat(attack: Attack, stub: pb_grpc.EngineServiceStub, numbers: Iterator[int], ends: Counter[str]) -> None:
    while True:
        try:
            await attack(stub, next(numbers))
            ends["done"] += 1
        except grpc.aio.AioRpcError as error:
            told = to_error(error)
            ends[told.reason or told.code.name] += 1
            await asyncio.sleep(_REFUSAL_PAUSE_S)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2]))
