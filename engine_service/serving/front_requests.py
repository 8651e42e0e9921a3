"""FrontRequest: one request of a client whose tokens are computed in the engine, and made text here.

Owns the text of each continuation, and when it ends by a stop string: the engine is notified, and what it has computed behind
the stop is dropped. The end of a continuation is reported once the engine has confirmed it, because its counts come from there.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog

from kvkeeper.common.service.turns import leave_place
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..outputs.model_text import ModelText, TextOutput
from ..values.errors import EngineError, RequestFailed
from ..values.output_chunk import OutputChunk, Usage
from ..values.request import FinishReason
from .engine_link import EngineCall, EngineLink, parse_refusal
from .frames import Admitted, Kind, Stopped
from .stream_buffer import StreamBuffer

log = structlog.get_logger()

GENERATE_PATH = "/kvkeeper.engine.v1.EngineService/Generate"
_CUT_SHORT = (FinishReason.CANCELLED, FinishReason.TIMED_OUT, FinishReason.STALLED)


class FrontRequest:
    """One request under way, from the frames of the engine to the buffer of its stream."""

    def __init__(self, asked: EngineCall, message: pb.GenerateRequest, unread: StreamBuffer, text: ModelText) -> None:
        self.request_id = ""
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked, self._unread, self._text = asked, unread, text
        self._stops, self._min_tokens = tuple(message.sampling.stop), message.sampling.min_tokens
        self._keep_special = message.sampling.keep_special_tokens
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
        self._note_end()
        self._asked.drop()

    def fail(self, refusal: EngineError) -> None:
        """End it with an error. One that has ended is left alone."""
        if not self._is_over:
            self._note_end()
            self._asked.send_kind(Kind.BROKEN, refusal)
            self._unread.put(refusal)

    # -- for the link

    def take(self, kind: Kind, body: Any) -> None:
        """What the engine says of it."""
        if kind is Kind.ADMITTED:
            admitted: Admitted = body
            self.request_id, self._context = admitted.request_id, admitted.context
            self._makes_text = admitted.makes_text
            if not self.admitted.done():
                self.admitted.set_result(None)
        elif not self.admitted.done():
            self.admitted.set_exception(parse_refusal(kind, body))
        elif self._is_over:
            return
        elif kind is Kind.ERROR:
            self._note_end()
            self._unread.put(body)
        elif kind is Kind.CHUNK:
            self._take_chunk(body)

    def _note_end(self) -> None:
        """Nothing more of it is read."""
        self._is_over = True
        self._asked.take_tokens = lambda token_ids: None

    def take_tokens(self, token_ids: list[int]) -> None:
        """The next tokens of continuation 0, of which nothing more than their text is to be reported."""
        if self._stops:
            self._take_chunk(OutputChunk(0, "", tuple(token_ids)))
            return None
        texts = list[str]()
        try:
            if not self._output(0).has_text:
                self._asked.take_tokens = self._unread.add
                return self._unread.add(token_ids)
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

    def _take_chunk(self, chunk: OutputChunk) -> None:
        try:
            self._add_chunk(chunk)
        except Exception:
            self._fail_text()

    def _add_chunk(self, chunk: OutputChunk) -> None:
        index, reason = chunk.index, chunk.finish_reason
        if index in self._stopped:
            if reason is not None:
                self._end(replace(self._stopped.pop(index), usage=self._usage(chunk.usage)))
            return
        if not self._makes_text:
            self._end(chunk)
            return
        texts = list[str]()
        is_stopped = self._push(index, chunk.token_ids, texts)
        num_tokens = self._num_taken[index] = self._num_taken.get(index, 0) + len(texts)
        if is_stopped:
            logprobs = chunk.logprobs[: len(texts)]
            token_ids = chunk.token_ids[: len(texts)]
            chunk = replace(chunk, token_ids=token_ids, logprobs=logprobs, finish_reason=FinishReason.STOP)
        elif reason is not None:
            texts.append(self._rest(index, reason))
        chunk = replace(chunk, text="".join(texts), usage=self._usage(chunk.usage))
        if is_stopped and reason is None:
            self._stopped[index] = chunk
            self._asked.send_kind(Kind.STOPPED, Stopped(index, num_tokens))
        else:
            self._end(chunk)

    def _end(self, chunk: OutputChunk) -> None:
        self._is_over = chunk.usage is not None
        self._unread.put(chunk)

    def _push(self, index: int, token_ids: Sequence[int], texts: list[str]) -> bool:
        """Add the text of each token to texts. Whether one of them completed a stop string; it is the last."""
        output = self._output(index)
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
            output = self._outputs[index] = self._text.output(self._context, self._stops, self._min_tokens, self._keep_special)
        return output

    def _usage(self, usage: Usage | None) -> Usage | None:
        """The engine may have counted tokens behind a stop string that were computed before it heard of it."""
        if usage is None or not self._stops:
            return usage
        return replace(usage, new_tokens=sum(self._num_taken.values()))


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
