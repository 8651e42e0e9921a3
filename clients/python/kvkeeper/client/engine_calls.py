"""What the engine service is asked and what comes back: pure, shared by the synchronous and the asyncio client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvkeeper.client.retry import CallOptions
from kvkeeper.engine.v1 import engine_service_pb2 as pb

Prompt = str | Sequence[int] | npt.NDArray[Any] | Sequence[Mapping[str, str]]

_DEFAULT_TIMEOUT_MS = 60_000  # the service's
_SLACK_S = 5.0  # the service's own deadline, with its reason, comes before the client's


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of one continuation. finish_reason is set on its last piece."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # a name of FinishReason without its prefix, in lower case


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request that ended."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    copied_blocks: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; None leaves it to the service. The protocol's SamplingParams explains each."""

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


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What a request asks for beside its prompt and sampling."""

    n: int | None = None
    request_id: str = ""
    priority: int = 0
    timeout_ms: int | None = None
    tenant: str = ""
    skip_look_up: bool = False
    sampling: Sampling = field(default_factory=Sampling)


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """A string is text, integers are token ids, mappings with role and content are a conversation."""
    sampling = {name: value for name in Sampling.__dataclass_fields__ if (value := getattr(options.sampling, name)) is not None}
    request = pb.GenerateRequest(
        request_id=options.request_id,
        sampling=pb.SamplingParams(**sampling),
        n=options.n,
        priority=options.priority,
        timeout_ms=options.timeout_ms,
        tenant=options.tenant,
        skip_look_up=options.skip_look_up,
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif len(prompt) and isinstance(prompt[0], Mapping):
        for message in prompt:
            request.chat.messages.add(**cast(Mapping[str, str], message))
        return request
    else:
        request.token_ids.ids.extend(np.asarray(prompt).tolist())
        request.token_ids.SetInParent()
    return request


def stream_options(base: CallOptions, timeout_ms: int | None) -> CallOptions:
    """The deadline of a Generate: that of the request and a little more."""
    timeout_s = (_DEFAULT_TIMEOUT_MS if timeout_ms is None else timeout_ms) / 1000 + _SLACK_S
    return CallOptions(timeout_s, base.retry_s, base.first_pause_s, base.longest_pause_s)


def piece_of(message: pb.GenerateResponse) -> Piece:
    reason = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
    return Piece(message.index, message.text, tuple(message.token_ids), None if reason == "unspecified" else reason)


def usage_of(message: pb.GenerateResponse) -> Usage | None:
    if not message.HasField("usage"):
        return None
    usage = message.usage
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.new_tokens, usage.copied_blocks, usage.num_preemptions)
