"""FrontRequest: one request of a client whose tokens are computed in the engine, and made text here.

Owns the text of each continuation, and when it ends by a stop string: the engine is told, and what it has computed behind the
stop is dropped. The end of a continuation is told once the engine has confirmed it, because its counts come from there.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from kvkeeper.common.service.turns import leave_place
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ...outputs.model_text import ModelText
from ...outputs.plain_reader import PlainReader
from ...outputs.stopping import TextOutput
from ...values.errors import EngineError, RequestFailed
from ...values.output_chunk import OutputChunk, PlainTokens, Usage
from ...values.request import FinishReason
from ..fronts.frames import Kind
from ..fronts.told import Admitted, error_of, error_to_bytes, stopped_to_bytes
from ..streams.streamed import Send
from .engine_link import Asked, EngineLink, refusal_of

log = structlog.get_logger()

GENERATE_PATH = "/kvkeeper.engine.v1.EngineService/Generate"
_MOST_PLAIN = 4096  # tokens without a chunk; then they are sent as one, so that what a client does not read is counted
_CUT_SHORT = (FinishReason.CANCELLED, FinishReason.TIMED_OUT, FinishReason.STALLED)
_REASONS = {pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


class FrontRequest:
    """One request under way. It is what Streamed says."""

    def __init__(self, asked: Asked, message: pb.GenerateRequest, send: Send, text: ModelText) -> None:
        """send: gets chunks and the error that ends it."""
        self.request_id = ""
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked, self._send, self._text = asked, send, text
        self._stops = tuple(message.sampling.stop)
        self._has_plain = message.n <= 1 and not self._stops
        self._makes_text = False
        self._context: list[int] = []
        self._outputs: dict[int, TextOutput] = {}  # by continuation
        self._stopped: dict[int, OutputChunk] = {}  # the last chunks of those that met a stop string, not confirmed yet
        self._num_taken: dict[int, int] = {}  # tokens by continuation, those behind its end left out
        self._plain: list[int] = []
        self._on_more: Callable[[], None] | None = None
        self._was_told = False
        self._is_over = False
        asked.take, asked.take_plain = self.take, self.take_plain

    # -- for its stream

    def cancel(self) -> None:
        self._is_over = True
        self._asked.drop()

    def fail(self, refusal: EngineError) -> None:
        if not self._is_over:
            self._is_over, self._plain = True, []  # what was not asked for may be behind chunks that were dropped
            self._asked.tell(Kind.BROKEN, error_to_bytes(refusal))
            self._send(refusal)

    def let_take_more(self, on_more: Callable[[], None]) -> None:
        self._on_more = on_more

    def let_read(self, reader: PlainReader, number: int) -> bool:
        return False  # its tokens are here

    def take_more(self) -> PlainTokens | None:
        self._was_told = False
        if not self._plain:
            return None
        token_ids, self._plain = self._plain, []
        if not self._makes_text:
            return PlainTokens(token_ids, "")
        output, texts = self._output(0), list[str]()
        try:
            for token_id in token_ids:
                texts.append(output.push(token_id)[0])
        except Exception:
            if texts:
                self._send(OutputChunk(0, "".join(texts), tuple(token_ids[: len(texts)])))
            self._fail_text()
            return None
        return PlainTokens(token_ids, "".join(texts))

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
            self._settle()
            self._is_over = True
            self._send(error_of(body))
        elif kind is Kind.CHUNK:
            message = pb.GenerateResponse.FromString(body)
            if self._is_plain(message):
                self.take_plain(list(message.token_ids))
                return
            self._settle()
            if not self._is_over:
                self._guarded(self._take_chunk, message)

    def _is_plain(self, message: pb.GenerateResponse) -> bool:
        """Whether a token that the engine sent alone, as it does where the interval is 0, waits for a reader that asks."""
        asks = self._on_more is not None and self._has_plain and 0 in self._num_taken
        return asks and not (message.finish_reason or message.text or message.logprobs or message.prompt_logprobs)

    def take_plain(self, token_ids: list[int]) -> None:
        """Tokens of continuation 0."""
        if self._is_over:
            return
        if self._stops and self._makes_text:
            self._guarded(self._take_chunk, pb.GenerateResponse(token_ids=token_ids))
            return
        self._plain += token_ids
        if len(self._plain) > _MOST_PLAIN:
            self._settle()
        elif not self._was_told and self._on_more is not None:
            self._was_told = True
            self._on_more()

    def _guarded(self, take: Callable[[pb.GenerateResponse], None], message: pb.GenerateResponse) -> None:
        try:
            take(message)
        except Exception:
            self._fail_text()

    def _fail_text(self) -> None:
        log.exception("text_failed", request_id=self.request_id)
        self.fail(RequestFailed("the tokens could not be turned into text"))

    def _settle(self) -> None:
        """Make the plain tokens a chunk, because something else follows."""
        if (more := self.take_more()) is not None:
            self._send(more.chunk())

    def _take_chunk(self, message: pb.GenerateResponse) -> None:
        index = message.index
        if index in self._stopped:
            if message.finish_reason:
                self._end(replace(self._stopped.pop(index), usage=self._usage_of(message)))
            return
        reason = _REASONS.get(message.finish_reason)
        text, num_tokens, is_stopped = message.text, len(message.token_ids), False
        if self._makes_text:
            text, num_tokens, is_stopped = self._text_of(index, message.token_ids)
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
        self._send(chunk)

    def _text_of(self, index: int, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """Text, the number of its tokens, and whether the last of these completed a stop string."""
        output, texts = self._output(index), list[str]()
        for token_id in token_ids:
            text, is_stopped = output.push(token_id)
            texts.append(text)
            if is_stopped:
                return "".join(texts), len(texts), True
        return "".join(texts), len(texts), False

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

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self.text = ModelText(None)

    async def admit(self, message: pb.GenerateRequest, send: Send) -> FrontRequest:
        """Queue what the message asks for. Raises EngineError."""
        asked = self._link.ask()
        request = FrontRequest(asked, message, send, self.text)
        try:
            asked.send(GENERATE_PATH, message.SerializeToString())
            await request.admitted
        except BaseException:
            request.cancel()
            raise
        leave_place()  # the engine counts the message; the call lasts as long as the stream
        return request
