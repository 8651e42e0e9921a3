"""From messages to values: a GenerateRequest becomes what a Generation is made of, with every field in its bounds.

Raises EngineError for what the protocol forbids.
"""

import hashlib
import random
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..outputs.beam_search import BeamOptions
from ..values.errors import InvalidField
from ..values.request import InputLimits, Retention, ReuseHint
from ..values.sampling_params import SamplingParams, SamplingParamsError, with_fields
from .ownership import known_id, own_tenant
from .submission import Received

_seeds = random.Random()  # asks the system once; a call for each request costs the loop a wait for the interpreter
MAX_WAIT_MS = 60_000
MAX_RETAIN_MS = 3_600_000
MAX_CONTINUATIONS = 64
_MAX_NAME_CHARS = 64
_MAX_SALT_CHARS = 256
_MAX_METADATA, _MAX_VALUE_CHARS = 16, 256
_MAX_LOGPROBS = 20
_MAX_BEAMS, _MAX_LENGTH_PENALTY = 64, 10
_MAX_THOUGHT_BYTES = 64  # of what begins one, and of what ends it
_MAX_STOP_IDS = 64


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A GenerateRequest without its prompt. max_tokens None: the default, or what fits."""

    request_id: str
    n: int
    best_of: int | None
    beams: BeamOptions | None
    priority: int
    timeout_ms: int | None
    tenant: str
    look_up: bool
    max_tokens: int | None
    params: SamplingParams
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    session_id: str
    metadata: Mapping[str, str]
    retention: Retention | None
    reuse_hint: ReuseHint
    retain_ms: int
    cache_salt: str


def parse_options(request: pb.GenerateRequest, defaults: SamplingParams, limits: InputLimits) -> RequestOptions:
    """defaults: of the model, where a sampling field is absent. Raises InvalidField."""
    sampling = request.sampling
    n = request.n if request.HasField("n") else 1
    best_of = request.best_of if request.HasField("best_of") else None
    timeout_ms = request.timeout_ms if request.HasField("timeout_ms") else None
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
    _check_name("request_id", request.request_id)
    _check_name("tenant", request.tenant)
    _check_name("session_id", request.session_id)
    _check_metadata(request.metadata)
    _check_range("n", n, 1, MAX_CONTINUATIONS)
    if best_of is not None:
        _check_range("best_of", best_of, n, MAX_CONTINUATIONS)
    _check_range("priority", request.priority, -1000, 1000)
    _check_range("reuse_hint", request.reuse_hint, 0, max(ReuseHint))
    _check_range("retain_ms", request.retain_ms, 0, 0 if request.reuse_hint == ReuseHint.NONE else MAX_RETAIN_MS)
    if len(request.cache_salt) > _MAX_SALT_CHARS or not request.cache_salt.isprintable():
        text = f"cache_salt: at most {_MAX_SALT_CHARS} printable characters"
        raise InvalidField(text, field="cache_salt", limit=_MAX_SALT_CHARS)
    if timeout_ms is not None:
        _check_range("timeout_ms", timeout_ms, 1, 3_600_000)
    if max_tokens is not None:
        _check_range("sampling.max_tokens", max_tokens, 1, 2**31 - 1)
    _check_range("sampling.min_tokens", sampling.min_tokens, 0, 2**31 - 1 if max_tokens is None else max_tokens)
    _check_stops(sampling.stop, limits)
    _check_thought(sampling)
    if len(sampling.stop_token_ids) > _MAX_STOP_IDS:
        raise InvalidField(f"at most {_MAX_STOP_IDS} stop token ids", field="sampling.stop_token_ids", limit=_MAX_STOP_IDS)
    return RequestOptions(
        request_id=known_id(request.request_id or str(uuid.uuid4())),
        n=n,
        best_of=best_of,
        beams=_parse_beams(request, n) if request.HasField("beam_search") else None,
        priority=request.priority,
        timeout_ms=timeout_ms,
        tenant=own_tenant(request.tenant),
        look_up=not request.skip_look_up,
        max_tokens=max_tokens,
        params=_parse_sampling(sampling, defaults),
        seed=sampling.seed % 2**64 if sampling.HasField("seed") else _seeds.getrandbits(64),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        num_logprobs=_num_logprobs(sampling, "num_logprobs"),
        num_prompt_logprobs=_num_logprobs(sampling, "num_prompt_logprobs"),
        session_id=request.session_id,
        metadata=dict(request.metadata),
        retention=_parse_retention(request),
        reuse_hint=ReuseHint(request.reuse_hint),
        retain_ms=request.retain_ms,
        cache_salt=request.cache_salt,
    )


def _check_stops(stops: Sequence[str], limits: InputLimits) -> None:
    field, most = "sampling.stop", limits.num_stop_strings
    if len(stops) > most:
        raise InvalidField(f"at most {most} stop strings", field=field, limit=most, flag="--max-stop-strings")
    for stop in stops:
        num_bytes, most = len(stop.encode()), limits.stop_bytes
        if not num_bytes:
            raise InvalidField(f"{field}: 1 to {most} bytes, not 0", field=field, limit=1)
        if num_bytes > most:
            text = f"{field}: at most {most} bytes, not {num_bytes}"
            raise InvalidField(text, field=field, limit=most, flag="--max-stop-bytes")


def _check_thought(sampling: pb.SamplingParams) -> None:
    if not sampling.HasField("thought"):
        return
    if sampling.WhichOneof("constraint") is None:
        raise InvalidField("sampling.thought: there is no constraint that is about what follows it", field="sampling.thought")
    for name, least in (("opens", 0), ("closes", 1)):
        _check_range(f"sampling.thought.{name}", len(getattr(sampling.thought, name).encode()), least, _MAX_THOUGHT_BYTES)


def _parse_beams(request: pb.GenerateRequest, n: int) -> BeamOptions:
    beams, sampling = request.beam_search, request.sampling
    length_penalty = beams.length_penalty if beams.HasField("length_penalty") else 1.0
    _check_range("beam_search.num_beams", beams.num_beams, n, _MAX_BEAMS)
    if not -_MAX_LENGTH_PENALTY <= length_penalty <= _MAX_LENGTH_PENALTY:
        limit = _MAX_LENGTH_PENALTY
        raise InvalidField(f"length_penalty: -{limit} to {limit}", field="beam_search.length_penalty", limit=limit)
    others = {"best_of": request.HasField("best_of"), "a constraint": sampling.WhichOneof("constraint") is not None}
    others["log probabilities"] = sampling.HasField("num_logprobs") or sampling.HasField("num_prompt_logprobs")
    for other, is_given in others.items():
        if is_given:
            raise InvalidField(f"beam_search: does not go together with {other}", field="beam_search")
    return BeamOptions(beams.num_beams, length_penalty, beams.early_stopping)


def _parse_retention(request: pb.GenerateRequest) -> Retention | None:
    if not request.HasField("retention"):
        return None
    sink, window = request.retention.num_sink_tokens, request.retention.num_window_tokens
    _check_range("retention.num_sink_tokens", sink, 0, 2**31 - 1)
    _check_range("retention.num_window_tokens", window, 1, 2**31 - 1)
    return Retention(sink, window)


def _num_logprobs(sampling: pb.SamplingParams, field: str) -> int | None:
    if not sampling.HasField(field):
        return None
    count = int(getattr(sampling, field))
    _check_range(f"sampling.{field}", count, 0, _MAX_LOGPROBS)
    return count


def _parse_sampling(sampling: pb.SamplingParams, defaults: SamplingParams) -> SamplingParams:
    given: dict[str, Any] = {
        field.name: getattr(sampling, field.name) for field in fields(SamplingParams) if sampling.HasField(field.name)
    }
    try:
        return with_fields(defaults, given)
    except SamplingParamsError as error:
        raise InvalidField(f"{error.field}: {error.allowed}", field=f"sampling.{error.field}") from None


def parse_submission(message: pb.SubmitRequestRequest) -> tuple[str, bytes]:
    """The request's id, which must be there, and a digest of its contents. Raises InvalidField."""
    _check_name("request.request_id", message.request.request_id)
    if not message.request.request_id:
        raise InvalidField("request.request_id: needed, to fetch the results by", field="request.request_id")
    return known_id(message.request.request_id), hashlib.sha256(message.request.SerializeToString(deterministic=True)).digest()


def parse_wait(message: pb.GetRequestRequest) -> float:
    """Seconds. Raises InvalidField."""
    _check_range("wait_ms", message.wait_ms, 0, MAX_WAIT_MS)
    return message.wait_ms / 1000


def parse_received(message: pb.StreamRequestRequest) -> list[Received]:
    """What the client has of each continuation. Raises InvalidField."""
    _check_name("request_id", message.request_id)
    if len(message.received) > MAX_CONTINUATIONS:
        text = f"received: at most {MAX_CONTINUATIONS} continuations"
        raise InvalidField(text, field="received", limit=MAX_CONTINUATIONS)
    found: dict[int, Received] = {}
    for place, one in enumerate(message.received):
        field = f"received[{place}].index"
        _check_range(field, one.index, 0, MAX_CONTINUATIONS - 1)
        _check_range(f"received[{place}].num_tokens", one.num_tokens, 0, 2**31 - 1)
        if one.index in found:
            raise InvalidField(f"{field}: each continuation once", field=field)
        found[one.index] = Received(one.index, one.num_tokens, one.has_ended)
    return list(found.values())


def parse_page(request: pb.ListRequestsRequest) -> tuple[int, int]:
    """How many rows are wanted, and the rank of arrival that they come after. Raises InvalidField."""
    _check_name("session_id", request.session_id)
    _check_range("page_size", request.page_size, 0, 1000)
    if not re.fullmatch(r"\d{0,18}", request.page_token):
        raise InvalidField("page_token: not one that this service gave", field="page_token")
    return request.page_size or 100, int(request.page_token or -1)


def _check_name(field: str, name: str) -> None:
    if len(name) > _MAX_NAME_CHARS:
        raise InvalidField(f"{field}: at most {_MAX_NAME_CHARS} characters", field=field, limit=_MAX_NAME_CHARS)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    field = "metadata"
    if len(metadata) > _MAX_METADATA:
        raise InvalidField(f"metadata: at most {_MAX_METADATA} entries", field=field, limit=_MAX_METADATA)
    for key, value in metadata.items():
        if not 1 <= len(key) <= _MAX_NAME_CHARS:
            raise InvalidField(f"metadata: keys of 1 to {_MAX_NAME_CHARS} characters", field=field, limit=_MAX_NAME_CHARS)
        if len(value) > _MAX_VALUE_CHARS:
            text = f"metadata: values of at most {_MAX_VALUE_CHARS} characters"
            raise InvalidField(text, field=field, limit=_MAX_VALUE_CHARS)


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidField(f"{field}: {low} to {high}, not {value}", field=field, limit=low if value < low else high)
