"""From values to messages: what streams tell of a request, chunk by chunk."""

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ...messages import logprobs_of, usage_of
from ...values.output_chunk import OutputChunk


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
