"""FrontRequest: one request of a client whose tokens are computed in the engine, and made text here.

Owns the text of each continuation, and when it ends by a stop string: the engine is told, and what it has computed behind the
stop is dropped. The end of a continuation is told once the engine has confirmed it, because its counts come from there.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.service.turns import leave_place

from ...outputs.model_text import ModelText
from ...outputs.stopping import TextOutput
from ...values.errors import EngineError, RequestFailed
from ...values.output_chunk import OutputChunk, Usage
from ...values.request import FinishReason
from ..fronts.frames import Kind
from ..fronts.told import Admitted, error_of, error_to_bytes, stopped_to_bytes
from ..streams.stream_buffer import StreamBuffer
from .engine_link import Asked, EngineLink, refusal_of

log = structlog.get_logger()

GENERATE_PATH = "/kvkeeper.engine.v1.EngineService/Generate"
_CUT_SHORT = (FinishReason.CANCELLED, FinishReason.TIMED_OUT, FinishReason.STALLED)
_REASONS = {pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


class FrontRequest:
    """One request under way, from the frames of the engine to the buffer of its stream."""

    def __init__(self, asked: Asked, message: pb.GenerateRequest, unread: StreamBuffer, text: ModelText) -> None:
        self.request_id = ""
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked, self._unread, self._text = asked, unread, text
        self._stops = tuple(message.sampling.stop)
        self._makes_text = False
        self._context: list[int] = []
        self._outputs: dict[int, TextOutput] = {}  # by continuation
        self._stopped: dict[int, OutputChunk] = {}  # the last chunks of those that met a stop string, not confirmed yet
        self._num_taken: dict[int, int] = {}  # tokens by continuation, those behind its end left out, where there are stops
        self._is_over = False
        asked.take, asked.take_tokens = self.take, self.take_tokens
        unread.on_full = self.fail

    def cancel(self) -> None:
        """Nothing more of it is wanted. Idempotent."""
        self._is_over = True
        self._asked.drop()

    def fail(self, refusal: EngineError) -> None:
        """End it with an error. One that has ended is left alone."""
        if not self._is_over:
            self._is_over = True
            self._asked.tell(Kind.BROKEN, error_to_bytes(refusal))
            self._unread.put(refusal)

    # -- for the link

    def take(self, kind: Kind, body: bytes) -> None:
        """What the engine says of it."""
        if kind is Kind.ADMITTED:
            told = Admitted.of(body)
            self.request_id, self._makes_text, self._context = told.request_id, told.makes_text, told.context
            if not self.admitted.done():
                self.admitted.set_result(None)
        elif not self.admitted.done():
            self.admitted.set_exception(refusal_of(kind, body))
        elif self._is_over:
            return
        elif kind is Kind.ERROR:
            self._is_over = True
            self._unread.put(error_of(body))
        elif kind is Kind.CHUNK:
            self._take_chunk(pb.GenerateResponse.FromString(body))

    def take_tokens(self, token_ids: list[int]) -> None:
        """The next tokens of continuation 0, of which there is nothing more to tell but their text."""
        if self._is_over:
            return
        if self._stops:
            self._take_chunk(pb.GenerateResponse(token_ids=token_ids))
            return
        texts = list[str]()
        try:
            self._push(0, token_ids, texts)
        except Exception:
            if texts:
                self._unread.add(token_ids[: len(texts)], texts)
            self._fail_text()
        else:
            self._unread.add(token_ids, texts)

    def _fail_text(self) -> None:
        log.exception("text_failed", request_id=self.request_id)
        self.fail(RequestFailed("the tokens could not be turned into text"))

    def _take_chunk(self, message: pb.GenerateResponse) -> None:
        try:
            self._add_chunk(message)
        except Exception:
            self._fail_text()

    def _add_chunk(self, message: pb.GenerateResponse) -> None:
        index = message.index
        if index in self._stopped:
            if message.finish_reason:
                self._end(replace(self._stopped.pop(index), usage=self._usage_of(message)))
            return
        reason = _REASONS.get(message.finish_reason)
        text, num_tokens, is_stopped = message.text, len(message.token_ids), False
        if self._makes_text:
            texts = list[str]()
            is_stopped = self._push(index, message.token_ids, texts)
            text, num_tokens = "".join(texts), len(texts)
            if reason is not None and not is_stopped:
                text += self._rest(index, reason)
        self._num_taken[index] = self._num_taken.get(index, 0) + num_tokens
        chunk = OutputChunk(
            index,
            text,
            tuple(message.token_ids[:num_tokens]),
            FinishReason.STOP if is_stopped else reason,
            logprobs=tuple(message.logprobs[:num_tokens]),  # type: ignore[arg-type]  # messages with the same fields
            prompt_logprobs=tuple(message.prompt_logprobs),  # type: ignore[arg-type]
            cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        )
        if is_stopped and reason is None:
            self._stopped[index] = chunk
            self._asked.tell(Kind.STOPPED, stopped_to_bytes(index, self._num_taken[index]))
        else:
            self._end(replace(chunk, usage=self._usage_of(message)))

    def _end(self, chunk: OutputChunk) -> None:
        self._is_over = chunk.usage is not None
        self._unread.put(chunk)

    def _push(self, index: int, token_ids: Sequence[int], texts: list[str]) -> bool:
        """Add the text of each token to texts. Whether one of them completed a stop string; it is the last."""
        output = self._output(index)
        if not output.has_text:
            texts += [""] * len(token_ids)
            return False
        for token_id in token_ids:
            text, is_stopped = output.push(token_id)
            texts.append(text)
            if is_stopped:
                return True
        return False

    def _rest(self, index: int, reason: FinishReason) -> str:
        """The text that was held back; empty where that fails, if the request was cut short: that it has to be in any case."""
        try:
            return self._output(index).flush()
        except Exception:
            if reason not in _CUT_SHORT:
                raise
            log.exception("text_failed", request_id=self.request_id)
            return ""

    def _output(self, index: int) -> TextOutput:
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = self._text.output(self._context, self._stops)
        return output

    def _usage_of(self, message: pb.GenerateResponse) -> Usage | None:
        """The engine may have counted tokens behind a stop string that were computed before it heard of it."""
        if not message.HasField("usage"):
            return None
        told = message.usage
        counts_here = self._stops and self._makes_text
        new_tokens = sum(self._num_taken.values()) if counts_here else told.new_tokens
        return Usage(told.prompt_tokens, told.cached_tokens, new_tokens, told.copied_blocks, told.num_preemptions)


class FrontRequests:
    """Takes requests to the engine."""

    def __init__(self, link: EngineLink, text: ModelText) -> None:
        self._link, self._text = link, text

    async def admit(self, message: pb.GenerateRequest, unread: StreamBuffer) -> FrontRequest:
        """Queue what the message asks for; its output is put into unread. Raises EngineError."""
        asked = self._link.ask()
        request = FrontRequest(asked, message, unread, self._text)
        try:
            asked.send(GENERATE_PATH, message.SerializeToString())
            await request.admitted
        except BaseException:
            request.cancel()
            raise
        leave_place()  # the engine counts the message; the call lasts as long as the stream
        return request
