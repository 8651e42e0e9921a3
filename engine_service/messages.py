"""From values to messages and back, where streams, calls and engines among each other use the same message."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from .values.errors import EngineError, WrongTokenId
from .values.output_chunk import OutputChunk, TokenLogprobs, Usage
from .values.request import Int32Array
from .values.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 256


def make_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(**usage.by_name())


def make_logprobs(found: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=one.token_id,
            logprob=one.logprob,
            rank=one.rank,
            top_token_ids=one.top_token_ids,
            top_logprobs=one.top_logprobs,
        )
        for one in found
    ]


def sampling_message(defaults: SamplingParams) -> pb.SamplingParams:
    """The values that apply where a request leaves a field out."""
    return pb.SamplingParams(max_tokens=DEFAULT_MAX_TOKENS, **asdict(defaults))


def token_array(ids: Any, vocab_size: int, field: str) -> Int32Array:
    """Token ids of a repeated field, each in the vocabulary. Raises WrongTokenId."""
    token_ids = np.array(ids, np.int64)
    if len(token_ids) and (largest := int(token_ids.max())) >= vocab_size:
        raise WrongTokenId(
            f"{field}: token id {largest} of a vocabulary of {vocab_size}", token_id=largest, vocab_size=vocab_size
        )
    return token_ids.astype(np.int32)


class TakesUnread(Protocol):
    """What reads the output of one request."""

    async def take_unread(self) -> tuple[list[OutputChunk], EngineError | None]:
        """What is new, once there is something, and the error that ends it."""


def make_response(request_id: str, chunk: OutputChunk) -> pb.GenerateResponse:
    """The message of a chunk."""
    reason = f"FINISH_REASON_{chunk.finish_reason.name}" if chunk.finish_reason is not None else None
    return pb.GenerateResponse(
        request_id=request_id,
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        finish_reason=reason,
        usage=make_usage(chunk.usage) if chunk.usage is not None else None,
        logprobs=make_logprobs(chunk.logprobs),
        prompt_logprobs=make_logprobs(chunk.prompt_logprobs),
        cumulative_logprob=chunk.cumulative_logprob,
    )


async def responses(request_id: str, unread: TakesUnread) -> AsyncIterator[pb.GenerateResponse]:
    """The messages of a request, to its last. Raises the error that ends it."""
    while True:
        chunks, error = await unread.take_unread()
        for chunk in chunks:
            yield make_response(request_id, chunk)
        if error is not None:
            raise error
        if chunks and chunks[-1].usage is not None:
            return
