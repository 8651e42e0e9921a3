"""EngineService's methods: messages in, messages out, on the engine and the model.

The task of a Generate call reads its own stream buffer and waits for its client alone; the loop never waits for it. Its end,
however it comes, ends the request. Limits of fields are in decode_request.py, the status of each error in status.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from prometheus_client import Metric

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.service import VERSION
from kvkeeper.service.methods import peer

from ..compute.served_model import ServedModel
from ..config import EngineConfig
from ..loop.engine import Engine
from ..loop.engine_counts import engine_counts
from ..loop.time_limits import limit_time
from ..outputs.beam_search import BeamOptions, BeamSearch, why_ends
from ..outputs.best_of import BestOf
from ..outputs.constraint import Constraint
from ..outputs.generation import Generation
from ..outputs.stopping import StopRules
from ..text_workers.text_work import TextWork
from ..values.errors import EngineError, InvalidField, NeverFits
from ..values.output_chunk import OutputChunk
from ..values.request import Int32Array, Request
from .decode_request import (
    DEFAULT_MAX_TOKENS,
    MAX_CHAT_MESSAGES,
    options_of,
    page_of,
    received_of,
    sampling_message,
    submission_of,
    token_array,
    wait_of,
)
from .encode_response import iteration_plan, request_info, response_of, results_of
from .metrics import engine_metrics
from .request_memory import RequestMemory
from .stream_buffer import StreamBuffer
from .submission import SubmissionReader
from .submissions import Submissions


class EngineService:
    """One method per call, in snake case; the server finds them by name."""

    def __init__(self, config: EngineConfig, model: ServedModel, engine: Engine, text_work: TextWork) -> None:
        self._config = config
        self._model = model
        self._engine = engine
        self._submissions = Submissions(config.max_results, config.result_ttl, config.result_memory)
        self._text_work = text_work
        self._request_memory = RequestMemory(config.request_memory)
        self.num_streams = 0  # Generate and StreamRequest calls that have not been answered to their end
        self._no_stream = asyncio.Event()
        self._no_stream.set()

    def metrics(self) -> Iterator[Metric]:
        """For a scrape."""
        return engine_metrics(self._engine, self._model, self._submissions.num_kept)

    async def wait_delivered(self) -> None:
        """Until every client has what its ended request gave: streams read to their end, results fetched."""
        await self._no_stream.wait()
        await self._submissions.wait_fetched()

    async def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        stream_buffer = StreamBuffer()
        generation = await self._admit(request, stream_buffer.put)
        stream_buffer.on_full = generation.fail
        with self._streaming():
            try:
                async for response in _responses(generation.request.request_id, stream_buffer):
                    yield response
            finally:
                generation.cancel()

    async def stream_request(self, request: pb.StreamRequestRequest) -> AsyncIterator[pb.GenerateResponse]:
        received = received_of(request)
        submission = await self._submissions.admitted(request.request_id)
        with self._streaming(), SubmissionReader(submission, received) as reader:
            async for response in _responses(request.request_id, reader):
                yield response
            submission.fetched.set()

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        """Counts a stream that has not been answered to its end."""
        self.num_streams += 1
        self._no_stream.clear()
        try:
            yield
        finally:
            self.num_streams -= 1
            if not self.num_streams:
                self._no_stream.set()

    async def submit_request(self, request: pb.SubmitRequestRequest) -> pb.SubmitRequestResponse:
        request_id, digest = submission_of(request)
        await self._submissions.submit(request_id, digest, lambda send: self._admit(request.request, send))
        return pb.SubmitRequestResponse(request_id=request_id)

    async def get_request(self, request: pb.GetRequestRequest) -> pb.GetRequestResponse:
        generation, submission = await self._submissions.wait(request.request_id, wait_of(request))
        return results_of(generation, submission, time.monotonic())

    async def get_iteration_plan(self, request: pb.GetIterationPlanRequest) -> pb.GetIterationPlanResponse:
        last = self._engine.last_iteration
        return pb.GetIterationPlanResponse() if last is None else iteration_plan(last)

    async def cancel_request(self, request: pb.CancelRequestRequest) -> pb.CancelRequestResponse:
        self._engine.requests.cancel(request.request_id)
        return pb.CancelRequestResponse()

    async def list_requests(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        page_size, after = page_of(request)
        now = time.monotonic()
        wanted = request.session_id
        later = [
            other
            for other in self._engine.requests.generations.values()
            if other.request.arrival > after and wanted in ("", other.session_id)
        ]
        rows = [request_info(generation, now) for generation in later[:page_size]]
        token = str(later[page_size - 1].request.arrival) if len(later) > page_size else ""
        return pb.ListRequestsResponse(requests=rows, next_page_token=token)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        held = self._request_memory.hold(request.ByteSize())
        try:
            ids = await self._text_work.encode(peer.get(), request.text, "text", self._max_len)
        finally:
            held.release()
        return pb.TokenizeResponse(token_ids=_as_list(ids))

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        if len(request.token_ids) > (limit := self._max_len):
            raise InvalidField(f"token_ids: at most {limit}, the length of a sequence", field="token_ids", limit=limit)
        token_ids = token_array(request.token_ids, self._model.vocab_size, "token_ids")
        with_added = request.keep_special_tokens
        return pb.DetokenizeResponse(text=await self._text_work.decode(peer.get(), token_ids, with_added=with_added))

    async def get_model(self, request: pb.GetModelRequest) -> pb.GetModelResponse:
        model, memory = self._model, self._engine.memory
        return pb.GetModelResponse(
            model_id=model.model_id,
            revision=model.revision,
            architecture=model.architecture,
            num_parameters=model.num_parameters,
            vocab_size=model.vocab_size,
            max_tokens_per_sequence=self._max_len,
            compute_dtype=model.compute_dtype,
            block_size=self._config.block_size,
            num_blocks=memory.session.pool.num_blocks if memory else 0,
            token_budget=self._config.token_budget,
            eos_token_ids=sorted(model.eos_token_ids),
            version=VERSION,
            sampling_defaults=sampling_message(model.sampling_defaults),
            stall_timeout_ms=round(self._config.stall_timeout * 1000),
            max_text_bytes=self._text_work.max_text_bytes(self._max_len),
            request_memory=self._config.request_memory,
            result_memory=self._config.result_memory,
            max_constraint_bytes=self._config.max_constraint_bytes,
            max_stop_strings=self._config.max_stop_strings,
            max_stop_bytes=self._config.max_stop_bytes,
        )

    async def get_stats(self, request: pb.GetStatsRequest) -> pb.GetStatsResponse:
        engine, stats = self._engine, self._engine.stats
        counts = {**engine_counts(engine), "num_kept_results": self._submissions.num_kept}
        return pb.GetStatsResponse(
            uptime_seconds=time.monotonic() - stats.started_at,
            time_to_first_token_p50_ms=stats.first_token.percentile_ms(50),
            time_to_first_token_p99_ms=stats.first_token.percentile_ms(99),
            time_between_tokens_p50_ms=stats.between_tokens.percentile_ms(50),
            time_between_tokens_p99_ms=stats.between_tokens.percentile_ms(99),
            scheduling_policy=engine.scheduler.waiting.ordering.policy.name,
            cache_session_id=engine.memory.session.session_id if engine.memory else "",
            **counts,  # type: ignore[arg-type]  # names and numbers are the protocol's
        )

    @property
    def _max_len(self) -> int:
        """Most tokens of a sequence; before the first session, the model's own limit."""
        return self._engine.scheduler.limits.max_len or self._model.max_len

    async def _admit(self, message: pb.GenerateRequest, send: Callable[[OutputChunk | EngineError], None]) -> Generation:
        """Queue what the message asks for. Its bytes count until send gets its end. Raises EngineError."""
        held = self._request_memory.hold(message.ByteSize())

        def send_and_release(output: OutputChunk | EngineError) -> None:
            if isinstance(output, EngineError) or output.usage is not None:
                held.release()
            send(output)

        try:
            return await self._queue(message, send_and_release)
        except BaseException:
            held.release()
            raise

    async def _queue(self, message: pb.GenerateRequest, send: Callable[[OutputChunk | EngineError], None]) -> Generation:
        options = options_of(message, self._model.sampling_defaults, self._config.input_limits)
        client = options.tenant or peer.get()
        if options.retention is not None and (reason := self._model.refuses_retention):
            raise InvalidField(f"retention: does not work with {reason}", field="retention")
        limit = self._engine.scheduler.limits.max_len_of(options.retention) or self._max_len
        prompt = await self._prompt(message, client, limit)
        num_computed = options.n if options.best_of is None else options.best_of
        beams, vocab_size = options.beams, self._model.vocab_size
        if beams is not None and 2 * beams.num_beams > vocab_size:
            limit = vocab_size // 2
            raise InvalidField(f"at most {limit} beams, half the vocabulary", field="beam_search.num_beams", limit=limit)
        constraints = await self._constraints(message.sampling, client, num_computed)
        self._engine.check_open()
        max_tokens = options.max_tokens
        if max_tokens is None:
            limit = self._engine.scheduler.limits.max_len_of(options.retention)
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, limit - len(prompt)))
        keeps_all = options.retention is not None and len(prompt) + max_tokens <= options.retention.num_tokens
        request = Request(
            request_id=options.request_id,
            prompt=prompt,
            max_new_tokens=max_tokens,
            n=num_computed,
            num_beams=None if beams is None else beams.num_beams,
            priority=options.priority,
            tenant=options.tenant,
            look_up=options.look_up and options.num_prompt_logprobs is None,  # cached tokens have no logits
            num_prompt_logprobs=options.num_prompt_logprobs,
            retention=None if keeps_all else options.retention,
        )
        eos = frozenset[int]() if options.ignore_eos else self._model.eos_token_ids
        stop = StopRules(eos, frozenset(options.stop_token_ids))
        context = prompt.tolist()
        outputs = [self._model.text.output(context, options.stop) for _ in range(num_computed)]
        generation = Generation(
            request,
            options.params,
            options.seed,
            stop,
            outputs,
            send,
            num_logprobs=options.num_logprobs,
            constraints=constraints,
            best_of=None if options.best_of is None else BestOf(options.n),
            search=None if beams is None else self._search(beams, request, stop, context, options.stop),
            session_id=options.session_id,
            metadata=options.metadata,
        )
        self._engine.submit(generation)
        if options.timeout_ms is not None:
            limit_time(generation, options.timeout_ms)
        return generation

    def _search(
        self, beams: BeamOptions, request: Request, stop: StopRules, context: list[int], strings: tuple[str, ...]
    ) -> BeamSearch:
        text = self._model.text.output(context, strings) if strings else None
        return BeamSearch(beams, request.n, request.max_new_tokens, stop.num_ids, partial(why_ends, stop), text)

    async def _constraints(self, sampling: pb.SamplingParams, client: str, n: int) -> list[Constraint]:
        """One for each continuation, or none. Raises EngineError."""
        kind = sampling.WhichOneof("constraint")
        if kind is None:
            return []
        source = sampling.choices.texts if kind == "choices" else getattr(sampling, kind)
        compiled = await self._text_work.constraint(client, kind, source)
        return [compiled, *(compiled.copy() for _ in range(n - 1))]

    async def _prompt(self, message: pb.GenerateRequest, client: str, max_len: int) -> Int32Array:
        """Token ids, 1 or more. Raises EngineError."""
        kind = message.WhichOneof("prompt")
        ids: Sequence[int] | Int32Array
        if kind == "text":
            ids = await self._text_work.encode(client, message.text, "text", max_len)
        elif kind == "chat":
            if len(message.chat.messages) > MAX_CHAT_MESSAGES:
                raise InvalidField(f"chat: at most {MAX_CHAT_MESSAGES} messages", field="chat", limit=MAX_CHAT_MESSAGES)
            messages = [{"role": turn.role, "content": turn.content} for turn in message.chat.messages]
            if any(turn["role"] not in ("system", "user", "assistant") for turn in messages) or not messages:
                raise InvalidField("chat: needs one message or more, each of role system, user or assistant", field="chat")
            ids = await self._text_work.encode_chat(client, messages, max_len)
        elif kind == "token_ids":
            if (num := len(message.token_ids.ids)) >= max_len:
                raise NeverFits(
                    f"the prompt has {num} tokens, and with one new token at most {max_len} fit",
                    requested=num + 1,
                    limit=max_len,
                )
            ids = message.token_ids.ids
        else:
            raise InvalidField("prompt: needed, as text, token_ids or chat", field="prompt")
        if not len(ids):
            raise InvalidField("the prompt has no tokens", field=kind)
        return token_array(ids, self._model.vocab_size, kind)


async def _responses(request_id: str, unread: StreamBuffer | SubmissionReader) -> AsyncIterator[pb.GenerateResponse]:
    """The messages of a request, to its last. Raises the error that ends it."""
    while True:
        chunks, error = await unread.take_unread()
        for chunk in chunks:
            yield response_of(request_id, chunk)
        if error is not None:
            raise error
        if chunks and chunks[-1].usage is not None:
            return


def _as_list(ids: list[int] | Int32Array) -> list[int]:
    return ids if isinstance(ids, list) else ids.tolist()
