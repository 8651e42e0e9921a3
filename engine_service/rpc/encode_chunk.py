"""From values to messages: what streams report of a request, chunk by chunk."""

from collections.abc import AsyncIterator
from typing import Protocol

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..messages import logprobs_of, usage_of
from ..values.errors import EngineError
from ..values.output_chunk import OutputChunk


class TakesUnread(Protocol):
    """What reads the output of one request."""

    async def take_unread(self) -> tuple[list[OutputChunk], EngineError | None]:
        """What is new, once there is something, and the error that ends it."""


def response_of(request_id: str, chunk: OutputChunk) -> pb.GenerateResponse:
    """The message of a chunk."""
    reason = f"FINISH_REASON_{chunk.finish_reason.name}" if chunk.finish_reason is not None else None
    return pb.GenerateResponse(
        request_id=request_id,
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        finish_reason=reason,
        usage=usage_of(chunk.usage) if chunk.usage is not None else None,
        logprobs=logprobs_of(chunk.logprobs),
        prompt_logprobs=logprobs_of(chunk.prompt_logprobs),
        cumulative_logprob=chunk.cumulative_logprob,
    )


async def responses(request_id: str, unread: TakesUnread) -> AsyncIterator[pb.GenerateResponse]:
    """The messages of a request, to its last. Raises the error that ends it."""
    while True:
        chunks, error = await unread.take_unread()
        for chunk in chunks:
            yield response_of(request_id, chunk)
        if error is not None:
            raise error
        if chunks and chunks[-1].usage is not None:
            return
