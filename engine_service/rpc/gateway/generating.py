"""A gateway's Generate, on that of our own service. Knows neither model nor loop, so that a front serves it, too."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvkeeper.engine.v1 import engine_service_pb2 as own

from .answers import Answer
from .requests import fill_prompt, own_request


class OwnCalls(Protocol):
    """The calls of our own service that a gateway's Generate is made of."""

    def generate(self, request: own.GenerateRequest) -> AsyncGenerator[own.GenerateResponse, None]: ...

    async def tokenize(self, request: own.TokenizeRequest) -> own.TokenizeResponse: ...


async def generate(request: pb.GenerateRequest, max_len: int, calls: OwnCalls) -> AsyncIterator[pb.GenerateResponse]:
    """The answer to a gateway. max_len: tokens of the longest sequence."""
    message = own_request(request)
    prompt: Sequence[int] = request.tokenized.input_ids
    if request.WhichOneof("input") == "text":  # how many tokens fit behind it is known by its tokens alone
        prompt = (await calls.tokenize(own.TokenizeRequest(text=request.text))).token_ids
    fill_prompt(message, prompt, max_len)
    answer = Answer(prompt, message.n, is_streamed=request.stream)
    async with contextlib.aclosing(calls.generate(message)) as responses:
        async for response in responses:
            for told in answer.add(response):
                yield told
