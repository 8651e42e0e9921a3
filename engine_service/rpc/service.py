"""EngineService's methods: messages in, messages out, on the engine and the model.

Streams of tokens are a front's to serve. Limits of fields are in decode_request.py, the status of each error in methods.py.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

from prometheus_client import Metric

from kvkeeper.client.credentials import Credentials
from kvkeeper.common.service import VERSION
from kvkeeper.common.service.methods import peer
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..compute.served_model import ServedModel
from ..config import EngineConfig
from ..loop.engine import Engine
from ..messages import responses, sampling_message, token_array
from ..movement.movement import Movement
from ..movement.prefill import PrefillServer, RemotePrefill
from ..movement.take_over import Queue, RequestHandover, TakeOver
from ..outputs.generation import Generation
from ..outputs.model_text import ModelText
from ..outputs.unread_tokens import UnreadTokens
from ..text_workers.text_work import MAX_PIECES, TextWork
from ..values.errors import InvalidField
from ..values.output_chunk import Send
from ..values.request import Int32Array
from ..values.sampling_params import SamplingParams
from .admission import Admission
from .decode_chat import parse_chat
from .decode_request import (
    parse_page,
    parse_received,
    parse_submission,
    parse_wait,
)
from .encode_response import iteration_plan, make_result, request_info
from .metrics import engine_counts, engine_metrics, vllm_metrics
from .ownership import is_own, known_id, require_all_tenants
from .stream_pace import OpenStreams, StreamPace
from .submission import SubmissionReader
from .submissions import Submissions


class EngineService:
    """One method per call that fronts forward, in snake case; found by name."""

    def __init__(
        self,
        config: EngineConfig,
        model: ServedModel,
        engine: Engine,
        text_work: TextWork,
        leave: Callable[[], Awaitable[None]],
        credentials: Credentials,
        message_bytes: int,
    ) -> None:
        """leave: stops the engine once its last request has ended; another one has taken its place.
        credentials: that this engine shows other engines. message_bytes: of a message with a prompt.
        """
        self.message_bytes = message_bytes
        self._config, self._credentials = config, credentials
        self._model = model
        self._engine = engine
        self._submissions = Submissions(config.max_results, config.result_ttl, config.result_memory)
        self._text_work = text_work
        movement, targets = Movement(engine), config.prefill_targets
        min_tokens, timeout_s = config.prefill_min_tokens, config.prefill_timeout
        self._remote_prefill = RemotePrefill(targets, min_tokens, timeout_s, model, engine, movement, credentials)
        self._admission = Admission(config, model, engine, text_work, self._remote_prefill)
        self._prefill_server = PrefillServer(config.role, model, engine, movement, self._admission.take_in)
        self._handover = RequestHandover(model, engine, movement, self._handed, self._settle_prompts, leave)
        self._take_over = TakeOver(model, movement, self._adopt, self._submissions.drop)
        self.pace = StreamPace(config.stream_interval_ms / 1000)
        self.streams = OpenStreams()

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self._model.name

    @property
    def text(self) -> ModelText:
        return self._model.text

    @property
    def sampling_defaults(self) -> SamplingParams:
        """The model's own, where a request names no field."""
        return self._model.sampling_defaults

    @property
    def unread(self) -> UnreadTokens:
        """The unread tokens of all requests."""
        return self._engine.requests.unread

    @property
    def num_streams(self) -> int:
        """The number of streams to clients that have not been written to their end."""
        return self.streams.num_open

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence."""
        return self._admission.max_len

    def metrics(self) -> Iterator[Metric]:
        """For a scrape."""
        families = list(engine_metrics(self._engine, self._model, self._submissions.num_kept))
        yield from families
        if self._config.vllm_metrics:
            yield from vllm_metrics(families, self._model.name)

    async def take_over(self, target: str, address: str) -> None:
        """Take the place of the engine at target; address: of this one, for clients. Raises TakeOverRefused."""
        await self._take_over.run(target, address, self._credentials)

    async def close(self) -> None:
        """End the connections to other engines."""
        await self._remote_prefill.close()

    async def wait_delivered(self) -> None:
        """Wait until every client has what its ended request gave: streams read to their end, results fetched."""
        await self.streams.wait_none()
        await self._submissions.wait_fetched()

    async def admit_for_front(self, message: pb.GenerateRequest, send: Send, *, makes_text: bool) -> Generation:
        """Queue a request whose stream is in a front. Raises EngineError."""
        return await self._admission.admit(message, send, makes_text=makes_text)

    def stop_at(self, generation: Generation, index: int, num_tokens: int) -> None:
        """A continuation of such a request met a stop string with so many tokens."""
        self._engine.requests.stop_at(generation, index, num_tokens)

    async def stream_request(self, request: pb.StreamRequestRequest) -> AsyncIterator[pb.GenerateResponse]:
        received = parse_received(request)
        submission = await self._submissions.admitted(known_id(request.request_id))
        with self.streams.counted(), SubmissionReader(submission, received, self.pace) as reader:
            async for response in responses(request.request_id, reader):
                yield response
            submission.fetched.set()

    async def submit_request(self, request: pb.SubmitRequestRequest) -> pb.SubmitRequestResponse:
        request_id, digest = parse_submission(request)
        await self._submissions.submit(request_id, digest, partial(self._admission.admit, request.request))
        return pb.SubmitRequestResponse(request_id=request.request.request_id)

    async def get_request(self, request: pb.GetRequestRequest) -> pb.GetRequestResponse:
        generation, submission = await self._submissions.wait(known_id(request.request_id), parse_wait(request))
        return make_result(generation, submission, time.monotonic())

    def hand_over(self, request: pb.HandOverRequest) -> AsyncIterator[pb.HandOverResponse]:
        require_all_tenants()
        return self._handover.hand_over(request)

    async def _settle_prompts(self) -> None:
        """Prompts on their way between engines stay with the requests."""
        self._prefill_server.end_all()
        await self._remote_prefill.give_up()

    def _handed(self, generation: Generation) -> pb.HandedRequest:
        """What a client asked for, as another engine is to carry it out."""
        digest = self._submissions.get_digest(generation.request.request_id)
        return pb.HandedRequest(request=self._admission.make_message(generation), submission_digest=digest)

    async def _adopt(self, handed: pb.HandedRequest, queue: Queue) -> None:
        """Have a request of another engine queued, and remember it for its client. Raises EngineError."""
        admit = partial(self._admission.take_in, handed.request, queue)
        submission = await self._submissions.adopt(handed.request.request_id, handed.submission_digest, admit)
        if not handed.submission_digest:
            submission.wait_for_client(self._config.client_grace)

    def prefill(self, request: pb.PrefillRequest) -> AsyncIterator[pb.PrefillResponse]:
        return self._prefill_server.prefill(request)

    async def confirm_hand_over(self, request: pb.ConfirmHandOverRequest) -> pb.ConfirmHandOverResponse:
        require_all_tenants()
        return await self._handover.confirm_hand_over(request)

    async def get_iteration_plan(self, request: pb.GetIterationPlanRequest) -> pb.GetIterationPlanResponse:
        require_all_tenants()
        last = self._engine.last_iteration
        return pb.GetIterationPlanResponse() if last is None else iteration_plan(last)

    async def cancel_request(self, request: pb.CancelRequestRequest) -> pb.CancelRequestResponse:
        self._engine.requests.cancel(known_id(request.request_id))
        return pb.CancelRequestResponse()

    async def list_requests(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        page_size, after = parse_page(request)
        now = time.monotonic()
        wanted = request.session_id
        later = [
            other
            for other in self._engine.requests.generations.values()
            if other.request.arrival > after and wanted in ("", other.session_id) and is_own(other.request.request_id)
        ]
        rows = [request_info(generation, now) for generation in later[:page_size]]
        token = str(later[page_size - 1].request.arrival) if len(later) > page_size else ""
        return pb.ListRequestsResponse(requests=rows, next_page_token=token)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        if request.HasField("chat") and request.text:
            raise InvalidField("text: not together with chat", field="text")
        client, max_len = peer.get(), self._admission.max_len
        held = self._admission.memory.hold(request.ByteSize())
        try:
            if request.HasField("chat"):
                ids = await self._text_work.encode_chat(client, parse_chat(request.chat), max_len)
            else:
                ids = await self._text_work.encode(client, request.text, "text", max_len)
        finally:
            held.release()
        return pb.TokenizeResponse(token_ids=_as_list(ids))

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        if len(request.token_ids) > (limit := self._admission.max_len):
            raise InvalidField(f"token_ids: at most {limit}, the length of a sequence", field="token_ids", limit=limit)
        if request.with_pieces and len(request.token_ids) > MAX_PIECES:
            raise InvalidField(f"token_ids: at most {MAX_PIECES} with pieces", field="token_ids", limit=MAX_PIECES)
        token_ids = token_array(request.token_ids, self._model.vocab_size, "token_ids")
        held = self._admission.memory.hold(request.ByteSize())
        try:
            text = await self._text_work.decode(peer.get(), token_ids, with_added=request.keep_special_tokens)
        finally:
            held.release()
        pieces = self._text_work.pieces(request.token_ids) if request.with_pieces else ()
        return pb.DetokenizeResponse(text=text, pieces=pieces)

    async def get_model(self, request: pb.GetModelRequest) -> pb.GetModelResponse:
        model, memory = self._model, self._engine.memory
        return pb.GetModelResponse(
            model_id=model.name,
            revision=model.revision,
            architecture=model.architecture,
            num_parameters=model.num_parameters,
            vocab_size=model.vocab_size,
            max_tokens_per_sequence=self._admission.max_len,
            compute_dtype=model.compute_dtype,
            block_size=self._config.block_size,
            num_blocks=memory.session.pool.num_blocks if memory else 0,
            token_budget=self._config.token_budget,
            eos_token_ids=sorted(model.eos_token_ids),
            version=VERSION,
            sampling_defaults=sampling_message(model.sampling_defaults),
            stall_timeout_ms=round(self._config.stall_timeout * 1000),
            max_text_bytes=self._text_work.max_text_bytes(self._admission.max_len),
            request_memory=self._config.request_memory,
            result_memory=self._config.result_memory,
            max_constraint_bytes=self._config.max_constraint_bytes,
            max_stop_strings=self._config.max_stop_strings,
            max_stop_bytes=self._config.max_stop_bytes,
            chat_template="" if self.text.tokenizer is None else self.text.tokenizer.chat_template,
            text_part_of=model.text_part_of,
            response_template="" if self.text.tokenizer is None else self.text.tokenizer.response_template,
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
            num_step_waits={wait.value: count for wait, count in stats.num_waits.items()},
            **counts,  # type: ignore[arg-type]  # names and numbers are the protocol's
        )


def _as_list(ids: list[int] | Int32Array) -> list[int]:
    return ids if isinstance(ids, list) else ids.tolist()
