"""A gateway's Generate, on that of our own service. Knows neither model nor loop, so that a front serves it, too."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvkeeper.engine.v1 import engine_service_pb2 as own

from .answers import Answer
from .requests import own_request

Generate = Callable[[own.GenerateRequest], AsyncGenerator[own.GenerateResponse, None]]


async def generate(request: pb.GenerateRequest, max_len: int, own_generate: Generate) -> AsyncIterator[pb.GenerateResponse]:
    """The answer to a gateway. max_len: tokens of the longest sequence. own_generate: our own Generate."""
    message = own_request(request, max_len)
    answer = Answer(list(message.token_ids.ids), message.n, is_streamed=request.stream)
    async with contextlib.aclosing(own_generate(message)) as responses:
        async for response in responses:
            for told in answer.add(response):
                yield told
