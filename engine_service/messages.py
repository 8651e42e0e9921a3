"""From values to messages and back, where streams, calls and engines among each other use the same message."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from .values.errors import WrongTokenId
from .values.output_chunk import TokenLogprobs, Usage
from .values.request import Int32Array
from .values.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 256


def usage_of(usage: Usage) -> pb.Usage:
    return pb.Usage(**usage.by_name())


def logprobs_of(found: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=one.token_id,
            logprob=one.logprob,
            rank=one.rank,
            top_token_ids=one.top_token_ids,
            top_logprobs=one.top_logprobs,
        )
        for one in found
    ]


def sampling_message(defaults: SamplingParams) -> pb.SamplingParams:
    """The values that apply where a request leaves a field out."""
    return pb.SamplingParams(max_tokens=DEFAULT_MAX_TOKENS, **asdict(defaults))


def token_array(ids: Any, vocab_size: int, field: str) -> Int32Array:
    """Token ids of a repeated field, each in the vocabulary. Raises WrongTokenId."""
    token_ids = np.array(ids, np.int64)
    if len(token_ids) and (largest := int(token_ids.max())) >= vocab_size:
        raise WrongTokenId(
            f"{field}: token id {largest} of a vocabulary of {vocab_size}", token_id=largest, vocab_size=vocab_size
        )
    return token_ids.astype(np.int32)
