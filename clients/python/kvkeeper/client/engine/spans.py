"""The span of one Generate as its client sees it: from the call to the last chunk. Does nothing without tracing."""

import time
from typing import TYPE_CHECKING, Any

from kvkeeper.client.engine.calls import GenerateOptions
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.common import tracing
from kvkeeper.engine.v1 import engine_service_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class GenerateSpan:
    """The client's span of one request; without a span all methods do nothing.

    Names follow OpenTelemetry's conventions for generative models, where those have one.
    """

    def __init__(self, span: "Span | None") -> None:
        self._span = span
        self._started_at = time.monotonic()
        self._has_token = False
        self._reasons: dict[int, str] = {}

    @property
    def metadata(self) -> tracing.Metadata | None:
        """gRPC metadata of the call, each time that it is made."""
        return None if self._span is None else tracing.outgoing(self._span)

    def record_answer(self, message: pb.GenerateResponse) -> None:
        """Records an answer; the last one ends the span."""
        span = self._span
        if span is None:
            return
        if message.token_ids and not self._has_token:
            self._has_token = True
            span.set_attribute("gen_ai.response.id", message.request_id)
            span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._started_at)
        if message.finish_reason:
            self._reasons[message.index] = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
        if message.HasField("usage"):
            span.set_attribute("gen_ai.response.finish_reasons", [reason for _, reason in sorted(self._reasons.items())])
            span.set_attribute("gen_ai.usage.input_tokens", message.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", message.usage.new_tokens)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", message.usage.cached_tokens)
            span.end()

    def repeat(self) -> None:
        """Records that the call is made again."""
        if self._span is not None:
            self._span.add_event("kvkeeper.resubmitted")

    def fail(self, error: KvkeeperError) -> None:
        tracing.fail(self._span, error.reason or error.code.name)
        self.end()

    def end(self) -> None:
        """Ends the span, if it has not ended yet."""
        if self._span is not None and self._span.is_recording():
            self._span.end()


def begin_generate(options: GenerateOptions) -> GenerateSpan:
    """A child of the current span, if there is one."""
    tracer = tracing.tracer()
    if tracer is None:
        return GenerateSpan(None)
    sampling = options.sampling
    told: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvkeeper",
        "gen_ai.conversation.id": options.session_id or None,
        "gen_ai.request.choice.count": options.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
    }
    attributes = {name: value for name, value in told.items() if value is not None}
    return GenerateSpan(tracer.start_span("text_completion", kind=tracing.client(), attributes=attributes))
