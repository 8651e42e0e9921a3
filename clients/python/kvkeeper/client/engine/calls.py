"""Requests to the engine service and their answers: pure, shared by the synchronous and the asyncio client."""

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from kvkeeper.client.engine.prompts import Chat, Prompt, set_chat, set_prompt
from kvkeeper.client.retry import CallOptions
from kvkeeper.engine.v1 import engine_service_pb2 as pb

_LONGEST_WAIT_S = 60.0  # the service's
_REUSE_HINTS = {"": pb.REUSE_HINT_UNSPECIFIED, "none": pb.REUSE_HINT_NONE, "soon": pb.REUSE_HINT_SOON}
_CONSTRAINTS = {"json_schema", "regex", "choices"}
_SLACK_S = 5.0  # the service's own deadline, with its reason, comes before the client's


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of its token, its rank (1 is the likeliest), and the likeliest (token id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A part of one continuation. finish_reason is set on its last chunk.

    logprobs: one per token id, where asked for; prompt_logprobs: of the prompt from its second token on, in the first chunk.
    cumulative_logprob: sum of its tokens' log probabilities, in the last chunk of a continuation of best_of or beam search.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # a name of FinishReason without its prefix, in lower case
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request that ended."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    copied_blocks: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Thought:
    """Any text between two texts, before an output that a constraint is about. opens: empty if the prompt has begun it."""

    opens: str
    closes: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; the protocol's SamplingParams explains each. None: the model's sampling_defaults apply."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[Sequence[int], ...] = ()
    allowed_token_ids: Sequence[int] = ()
    thought: Thought | None = None
    keep_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a submitted request so far: one Piece with everything per continuation, by index.

    state is a name of RequestState without its prefix, in lower case; error is (reason, message) of one that failed.
    """

    request_id: str
    state: str
    outputs: tuple[OutputChunk, ...]
    usage: Usage | None
    error: tuple[str, str] | None
    session_id: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return self.state in ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A search for the likeliest continuations, instead of drawing them; None leaves it to the service."""

    num_beams: int
    length_penalty: float | None = None
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class Retention:
    """Each token attends to the first num_sink_tokens and the last num_window_tokens alone; the blocks between come back."""

    num_sink_tokens: int
    num_window_tokens: int


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """The options of a request beside its prompt and sampling.

    timeout_ms: most time from arrival to the last token; None: as long as it makes progress.
    retention: what is kept of it while it grows; None: everything.
    reuse_hint: what is known of the next use of its KV: "none" (a single question, or the last turn of a conversation) or
        "soon" (its next turn is certain, as with a tool call); empty: nothing.
    retain_ms: within what time its next turn is expected; 0: none is known.
    cache_salt: nothing cached is shared between requests with two salts.
    session_id: conversation that it belongs to; metadata: returned with the request, and used for nothing else.
    resubmit_s: seconds to keep asking again, for what has not come yet, after the engine went away; 0: not at all.
    """

    n: int | None = None
    best_of: int | None = None
    beam_search: BeamSearch | None = None
    request_id: str = ""
    priority: int = 0
    timeout_ms: int | None = None
    tenant: str = ""
    skip_look_up: bool = False
    retention: Retention | None = None
    reuse_hint: str = ""
    retain_ms: int = 0
    cache_salt: str = ""
    session_id: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    resubmit_s: float = 0.0
    sampling: Sampling = field(default_factory=Sampling)


_OTHERWISE = {"sampling", "beam_search", "retention", "reuse_hint", "resubmit_s"}
_PLAIN = GenerateOptions.__dataclass_fields__.keys() - _OTHERWISE  # options that are fields of the request as they are


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Raises TypeError and ValueError for what no request can hold; the service checks the rest."""
    if options.reuse_hint not in _REUSE_HINTS:
        raise ValueError(f"reuse_hint is none or soon, not {options.reuse_hint!r}")
    sampling = {name: value for name in Sampling.__dataclass_fields__ if (value := getattr(options.sampling, name)) is not None}
    if len(constraints := sorted(sampling.keys() & _CONSTRAINTS)) > 1:
        raise ValueError(f"one constraint at most, not {' and '.join(constraints)}")  # the message would keep the last alone
    if "choices" in sampling:
        sampling["choices"] = pb.Choices(texts=sampling["choices"])
    if "thought" in sampling:
        sampling["thought"] = pb.Thought(**asdict(sampling["thought"]))
    sampling["bad_words_token_ids"] = [pb.TokenIds(ids=word) for word in options.sampling.bad_words_token_ids]
    request = pb.GenerateRequest(
        **{name: getattr(options, name) for name in _PLAIN},
        sampling=pb.SamplingParams(**sampling),
        beam_search=None if options.beam_search is None else pb.BeamSearch(**asdict(options.beam_search)),
        retention=None if options.retention is None else pb.Retention(**asdict(options.retention)),
        reuse_hint=_REUSE_HINTS[options.reuse_hint],
    )
    set_prompt(request, prompt)
    return request


def submit_request(prompt: Prompt, options: GenerateOptions) -> pb.SubmitRequestRequest:
    """Draws an id where none is given, so that a repeat after a lost answer is the same request."""
    request = generate_request(prompt, options)
    request.request_id = request.request_id or str(uuid.uuid4())
    return pb.SubmitRequestRequest(request=request)


def tokenize_request(prompt: str | Chat) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return pb.TokenizeRequest(text=prompt)
    request = pb.TokenizeRequest()
    set_chat(request.chat, prompt)
    return request


def stream_request(request_id: str, received: Iterable[pb.ReceivedOutput]) -> pb.StreamRequestRequest:
    return pb.StreamRequestRequest(request_id=request_id, received=received)


def get_request(request_id: str, wait_s: float, options: CallOptions) -> pb.GetRequestRequest:
    """Waits at most wait_s, and well within the deadline of one call."""
    longest = min(_LONGEST_WAIT_S, options.timeout_s / 2)
    return pb.GetRequestRequest(request_id=request_id, wait_ms=int(1000 * max(0.0, min(wait_s, longest))))


def stream_options(base: CallOptions, timeout_ms: int | None) -> CallOptions:
    """The deadline of a Generate: the request's and a little more, or none: the service ends stalled requests."""
    return replace(base, timeout_s=math.inf if timeout_ms is None else timeout_ms / 1000 + _SLACK_S)


def parse_chunk(message: pb.GenerateResponse | pb.RequestOutput) -> OutputChunk:
    reason = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
    return OutputChunk(
        message.index,
        message.text,
        tuple(message.token_ids),
        None if reason == "unspecified" else reason,
        tuple(map(_parse_logprobs, message.logprobs)),
        tuple(map(_parse_logprobs, message.prompt_logprobs)),
        message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
    )


def _parse_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def parse_result(message: pb.GetRequestResponse) -> Result:
    return Result(
        request_id=message.request.request_id,
        state=pb.RequestState.Name(message.request.state).removeprefix("REQUEST_STATE_").lower(),
        outputs=tuple(map(parse_chunk, message.outputs)),
        usage=parse_usage(message),
        error=(message.error.reason, message.error.message) if message.HasField("error") else None,
        session_id=message.request.session_id,
        metadata=dict(message.request.metadata),
    )


def parse_usage(message: pb.GenerateResponse | pb.GetRequestResponse) -> Usage | None:
    if not message.HasField("usage"):
        return None
    usage = message.usage
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.new_tokens, usage.copied_blocks, usage.num_preemptions)
