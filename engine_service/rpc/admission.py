"""Admission: a message becomes a request that is queued, on the engine and the model.

Owns the bytes that open requests hold, and their messages, which another engine needs to continue with them. Limits of fields
are in decode_request.py.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from kvkeeper.common.service.methods import peer
from kvkeeper.common.service.turns import leave_place
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..compute.served_model import ServedModel
from ..config import EngineConfig
from ..loop.engine import Engine
from ..loop.time_limits import limit_time, within
from ..messages import DEFAULT_MAX_TOKENS, token_array
from ..movement.prefill import RemotePrefill
from ..outputs.beam_search import BeamOptions, BeamSearch, why_ends
from ..outputs.best_of import BestOf
from ..outputs.constraint import Constraint
from ..outputs.generation import Generation
from ..outputs.model_text import StopRules, TextOutput
from ..text_workers.text_work import TextWork
from ..values.errors import EngineError, InvalidField, NeverFits, TooMuchHeld, WrongRole
from ..values.output_chunk import OutputChunk, Send
from ..values.request import Int32Array, Request
from .decode_chat import parse_chat
from .decode_request import RequestOptions, parse_options
from .decode_rules import parse_rules

TIMES_MESSAGE = 4  # the bytes that came, the same taken apart, and 4 bytes or more for a token of 1 to 4 bytes, twice
EACH_BYTES = 4096  # counted for a request beside its message


class RequestMemory:
    """The bytes that open requests hold, and their limit: when another request is too much.

    An open request counts from its arrival to its end with what its message takes: the message itself, as it came and taken
    apart, and its tokens. A request that would exceed the limit is refused, and may come again when others have ended.
    """

    def __init__(self, limit: int) -> None:
        """Bytes."""
        self._limit = limit
        self.num_bytes = 0

    def hold(self, message_bytes: int) -> "HeldBytes":
        """Count a message. Raises TooMuchHeld."""
        wanted = EACH_BYTES + TIMES_MESSAGE * message_bytes
        if self.num_bytes + wanted > self._limit:
            text = f"open requests hold {self.num_bytes} bytes and this one needs {wanted}; the limit is {self._limit}"
            raise TooMuchHeld(text, requested=wanted, limit=self._limit)
        return HeldBytes(self, wanted)


class HeldBytes:
    """What one request counts for, until it is released."""

    def __init__(self, memory: RequestMemory, num_bytes: int) -> None:
        self._memory, self._num_bytes = memory, num_bytes
        memory.num_bytes += num_bytes

    def release(self) -> None:
        """Idempotent."""
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0


Queue = Callable[[Generation], Awaitable[None]]


class Admission:
    """Takes requests in, new ones and those of another engine."""

    def __init__(
        self, config: EngineConfig, model: ServedModel, engine: Engine, text_work: TextWork, prefill: RemotePrefill
    ) -> None:
        self.memory = RequestMemory(config.request_memory)
        self._prefill = prefill
        self._config, self._model, self._engine, self._text_work = config, model, engine, text_work
        self._messages: dict[Generation, pb.GenerateRequest] = {}  # of open requests

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence; before the first session, the model's own limit."""
        return self._engine.scheduler.limits.max_len or self._model.max_len

    async def admit(self, message: pb.GenerateRequest, send: Send, *, makes_text: bool = True) -> Generation:
        """Queue what the message asks for. Its bytes count until send gets its end. Raises EngineError.

        makes_text: False where send makes the text, and finds stop strings; but where the engine chooses by them, it makes it.
        """
        if self._config.role == "prefill":
            raise WrongRole("this engine computes prompts for others alone (--role prefill)", role=self._config.role)

        async def submit(generation: Generation) -> None:
            if not self._prefill.begin(generation, self.make_message):
                self._engine.submit(generation)

        return await self.take_in(message, submit, send, makes_text=makes_text)

    def make_message(self, generation: Generation) -> pb.GenerateRequest:
        """The message of an open request, with what was drawn or depends on this engine alone filled in."""
        request, message = generation.request, pb.GenerateRequest()
        message.CopyFrom(self._messages[generation])
        message.request_id, message.tenant = request.request_id, request.tenant
        message.token_ids.CopyFrom(pb.TokenIds(ids=request.prompt.tolist()))
        message.sampling.max_tokens = request.max_new_tokens
        message.sampling.seed = generation.seed - (1 << 64) * (generation.seed >= 1 << 63)
        return message

    async def take_in(self, message: pb.GenerateRequest, queue: Queue, send: Send, *, makes_text: bool = True) -> Generation:
        """Make a request of what the message asks for, and have it queued; send gets its output. As for admit."""
        arrived_at = time.monotonic()
        held = self.memory.hold(message.ByteSize())

        def send_and_release(output: OutputChunk | EngineError) -> None:
            if isinstance(output, EngineError) or output.usage is not None:
                held.release()
                self._messages.pop(generation, None)
                self._prefill.drop(generation)
            send(output)

        try:
            options = parse_options(message, self._model.sampling_defaults, self._config.input_limits)
            async with within(options.timeout_ms):
                generation = await self._generation(message, options, send_and_release, makes_text=makes_text)
            generation.started_at = arrived_at
            self._messages[generation] = message
            try:
                await queue(generation)
            except BaseException:
                self._messages.pop(generation, None)
                raise
            leave_place()
        except BaseException:
            held.release()
            raise
        if options.timeout_ms is not None:
            limit_time(generation, options.timeout_ms)
        return generation

    async def _generation(
        self, message: pb.GenerateRequest, options: RequestOptions, send: Send, *, makes_text: bool
    ) -> Generation:
        """What the message asks for, not queued yet. Raises EngineError."""
        client = get_client(peer.get(), options.tenant)
        if options.retention is not None and (reason := self._model.refuses_retention):
            raise InvalidField(f"retention: does not work with {reason}", field="retention")
        limit = self._engine.scheduler.limits.get_max_len(options.retention) or self.max_len
        prompt = await self._prompt(message, client, limit)
        num_computed = options.n if options.best_of is None else options.best_of
        beams, vocab_size = options.beams, self._model.vocab_size
        if beams is not None and 2 * beams.num_beams > vocab_size:
            limit = vocab_size // 2
            raise InvalidField(f"at most {limit} beams, half the vocabulary", field="beam_search.num_beams", limit=limit)
        eos = frozenset[int]() if options.ignore_eos else self._model.eos_token_ids
        stop = StopRules(eos, frozenset(options.stop_token_ids))
        rules = parse_rules(message.sampling, stop.ids, self._model.text, vocab_size)
        constraints = await self._constraints(message.sampling, client, num_computed)
        self._engine.check_open()
        max_tokens = self._max_tokens(options, len(prompt), message.sampling.min_tokens)
        keeps_all = options.retention is not None and len(prompt) + max_tokens <= options.retention.num_tokens
        request = Request(
            request_id=options.request_id,
            prompt=prompt,
            max_new_tokens=max_tokens,
            n=num_computed,
            num_beams=None if beams is None else beams.num_beams,
            priority=options.priority,
            tenant=options.tenant,
            client=client,
            look_up=options.look_up and options.num_prompt_logprobs is None,  # cached tokens have no logits
            num_prompt_logprobs=options.num_prompt_logprobs,
            retention=None if keeps_all else options.retention,
            reuse_hint=options.reuse_hint,
            retain_ms=options.retain_ms,
            cache_salt=options.cache_salt,
        )
        context, min_tokens = prompt.tolist(), message.sampling.min_tokens
        keep_special = message.sampling.keep_special_tokens
        makes_text = makes_text or bool(options.stop and (options.best_of is not None or beams is not None))
        text = self._model.text
        output = text.output if makes_text else text.no_output
        outputs = [output(context, options.stop, min_tokens, keep_special) for _ in range(num_computed)]
        return Generation(
            request,
            options.params,
            options.seed,
            stop,
            outputs,
            send,
            num_logprobs=options.num_logprobs,
            constraints=constraints,
            rules=rules,
            best_of=None if options.best_of is None else BestOf(options.n),
            search=None if beams is None else self._search(beams, request, stop, outputs[0] if options.stop else None),
            session_id=options.session_id,
            metadata=options.metadata,
        )

    def _max_tokens(self, options: RequestOptions, num_prompt: int, min_tokens: int) -> int:
        """As asked for; else the default, or as many as fit if they are fewer, but no fewer than min_tokens."""
        if options.max_tokens is not None:
            return options.max_tokens
        limit = self._engine.scheduler.limits.get_max_len(options.retention)
        return max(1, min_tokens, min(DEFAULT_MAX_TOKENS, limit - num_prompt))

    def _search(self, beams: BeamOptions, request: Request, stop: StopRules, text: TextOutput | None) -> BeamSearch:
        """text: of the empty list, where stop strings have to be found."""
        text = None if text is None else text.copy()
        return BeamSearch(beams, request.n, request.max_new_tokens, stop.num_ids, partial(why_ends, stop), text)

    async def _constraints(self, sampling: pb.SamplingParams, client: str, n: int) -> list[Constraint]:
        """One for each continuation, or none. Raises EngineError."""
        kind = sampling.WhichOneof("constraint")
        thought = (sampling.thought.opens, sampling.thought.closes) if sampling.HasField("thought") else None
        if kind is None:
            return []
        source = sampling.choices.texts if kind == "choices" else getattr(sampling, kind)
        compiled = await self._text_work.constraint(client, kind, source, thought)
        return [compiled, *(compiled.copy() for _ in range(n - 1))]

    async def _prompt(self, message: pb.GenerateRequest, client: str, max_len: int) -> Int32Array:
        """Token ids, 1 or more. Raises EngineError."""
        kind = message.WhichOneof("prompt")
        ids: Sequence[int] | Int32Array
        if kind == "text":
            ids = await self._text_work.encode(client, message.text, "text", max_len)
        elif kind == "chat":
            ids = await self._text_work.encode_chat(client, parse_chat(message.chat), max_len)
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


def get_client(peer: str, tenant: str) -> str:
    """The client that a call's work is counted for: its connection, or its tenant where gRPC distinguishes no connections."""
    return tenant or peer if peer.startswith("unix:") else peer


def get_connection(request: Request) -> str:
    """The connection that a request came by, among which starts go by turns; tenants of a Unix socket count as one."""
    return "" if request.client in ("", request.tenant) or request.client.startswith("unix:") else request.client
