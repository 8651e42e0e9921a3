"""A gateway's Generate, on that of our own service: chunks or all at the end, and one `complete` for each continuation.

Knows neither model nor loop, so that a front serves it, too.

A chunk has one token, however many came together: gateways feed the text of each chunk as a whole to what finds tool calls,
thoughts and stop strings in it, and parsers that were made for token after token lose what else is in the same piece. The
`complete` of a streamed continuation repeats no token.
"""

import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvkeeper.engine.v1 import engine_service_pb2 as own

from .requests import fill_prompt, own_request

_REASONS = {
    own.FINISH_REASON_LENGTH: "length",
    own.FINISH_REASON_STOP: "stop",
    own.FINISH_REASON_END_OF_SEQUENCE: "stop",
    own.FINISH_REASON_CANCELLED: "abort",
}
_FAILED = "error"


@dataclass(slots=True)
class _Output:
    """One continuation so far. Tokens and log probabilities are kept where nothing is streamed."""

    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[own.TokenLogprobs] = field(default_factory=list)
    reason: str = ""


# The calls of our own service that a gateway's Generate is made of.
OwnGenerate = Callable[[own.GenerateRequest], AsyncGenerator[own.GenerateResponse, None]]
OwnTokenize = Callable[[own.TokenizeRequest], Awaitable[own.TokenizeResponse]]


async def generate(
    request: pb.GenerateRequest, max_len: int, own_generate: OwnGenerate, own_tokenize: OwnTokenize
) -> AsyncIterator[pb.GenerateResponse]:
    """The answer to a gateway. max_len: tokens of the longest sequence."""
    message = own_request(request)
    prompt: Sequence[int] = request.tokenized.input_ids
    if request.WhichOneof("input") == "text":  # how many tokens fit behind it is known by its tokens alone
        prompt = (await own_tokenize(own.TokenizeRequest(text=request.text))).token_ids
    fill_prompt(message, prompt, max_len)
    answer = Answer(prompt, message.n, is_streamed=request.stream)
    async with contextlib.aclosing(own_generate(message)) as responses:
        async for response in responses:
            for event in answer.add(response):
                yield event


class Answer:
    """The answer to one Generate."""

    def __init__(self, prompt: Sequence[int], num_outputs: int, *, is_streamed: bool) -> None:
        """prompt: its tokens. num_outputs: as asked for, before anything has checked it."""
        self._prompt = prompt
        self._is_streamed = is_streamed
        self._num_outputs = num_outputs
        self._outputs: defaultdict[int, _Output] = defaultdict(_Output)
        self._prompt_logprobs: list[own.TokenLogprobs] = []

    def add(self, message: own.GenerateResponse) -> Iterator[pb.GenerateResponse]:
        """What the gateway is sent now that this message has come."""
        output = self._outputs[message.index]
        output.num_tokens += len(message.token_ids)
        if message.prompt_logprobs:
            self._prompt_logprobs = list(message.prompt_logprobs)
        if self._is_streamed:
            yield from self._chunks(message)
        else:
            output.token_ids += message.token_ids
            output.logprobs += message.logprobs
        if message.finish_reason:
            output.reason = _REASONS.get(message.finish_reason, _FAILED)
        if message.HasField("usage"):
            yield from self._completes(message.usage)

    def _chunks(self, message: own.GenerateResponse) -> Iterator[pb.GenerateResponse]:
        """One for each token; the first of a prompt's log probabilities has them, with a token or without."""
        input_logprobs = self._input_logprobs() if message.prompt_logprobs else None
        for at in range(max(len(message.token_ids), input_logprobs is not None)):
            token_ids = message.token_ids[at : at + 1]
            chunk = pb.GenerateStreamChunk(
                token_ids=token_ids,
                prompt_tokens=len(self._prompt),
                completion_tokens=len(token_ids),
                output_logprobs=_output_logprobs(message.logprobs[at : at + 1]),
                input_logprobs=input_logprobs if at == 0 else None,
                index=message.index,
            )
            yield pb.GenerateResponse(chunk=chunk)

    def _completes(self, usage: own.Usage) -> Iterator[pb.GenerateResponse]:
        for index in range(self._num_outputs):
            output = self._outputs[index]
            complete = pb.GenerateComplete(
                output_ids=output.token_ids,
                finish_reason=output.reason or _FAILED,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=output.num_tokens,
                cached_tokens=usage.cached_tokens,
                output_logprobs=_output_logprobs(output.logprobs),
                input_logprobs=None if self._is_streamed else self._input_logprobs(),
                index=index,
            )
            yield pb.GenerateResponse(complete=complete)

    def _input_logprobs(self) -> pb.InputLogProbs | None:
        """Log probabilities of the whole prompt; its first token has none."""
        if not self._prompt_logprobs:
            return None
        found = self._prompt_logprobs
        return pb.InputLogProbs(
            token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=each.logprob) for each in found)],
            token_ids=[*self._prompt[:1], *(each.token_id for each in found)],
            top_logprobs=[pb.TopLogProbs(), *_top_logprobs(found)],
        )


def _output_logprobs(found: Iterable[own.TokenLogprobs]) -> pb.OutputLogProbs | None:
    found = list(found)
    if not found:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in found],
        token_ids=[each.token_id for each in found],
        top_logprobs=_top_logprobs(found),
    )


def _top_logprobs(found: Iterable[own.TokenLogprobs]) -> Iterator[pb.TopLogProbs]:
    return (pb.TopLogProbs(values=each.top_logprobs, token_ids=each.top_token_ids) for each in found)
