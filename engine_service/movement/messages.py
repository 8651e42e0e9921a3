"""What engines send each other: what they compute, and requests on their way with the tokens that they have.

A generation is a function of its request and its tokens. So the engine that gets a request feeds the tokens to it again, one by
one: text, stop strings, constraints and counts come out as they were, and its output is the same, chunk by chunk.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping

import numpy as np

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..compute.served_model import ServedModel
from ..messages import make_logprobs, make_usage, sampling_message, token_array
from ..outputs.generation import Generation
from ..values.errors import ForeignEngine, InvalidField
from ..values.output_chunk import TokenLogprobs
from ..values.request import HeldTokens

_TOKENS_A_TURN = 256  # that are replayed before other tasks have their turn


def identity(model: ServedModel) -> pb.EngineIdentity:
    """All that a request's tokens depend on, beside the request."""
    return pb.EngineIdentity(
        revision=model.revision,
        compute_dtype=model.compute_dtype,
        vocab_size=model.vocab_size,
        sampling_defaults=sampling_message(model.sampling_defaults),
        kv_format=model.kv_format,
    )


def require_same(model: ServedModel, other: pb.EngineIdentity) -> None:
    """Raises ForeignEngine where another engine computes something else."""
    own = identity(model)
    for name in ("revision", "compute_dtype", "vocab_size", "sampling_defaults", "kv_format"):
        if getattr(own, name) != getattr(other, name):
            raise ForeignEngine(f"its {name} is not that of this engine", field=name)


def add_outputs(handed: pb.HandedRequest, generation: Generation, offers: Mapping[int, bytes]) -> None:
    """Add what a request that was taken out of the steps has computed. offers: of its sequences, by index."""
    request = generation.request
    if request.num_hit_tokens is not None:
        handed.usage.CopyFrom(make_usage(generation.usage))
    if generation.sends_all_at_the_end:
        return
    if generation.num_taken or offers:
        num_prompt = len(request.prompt)
        for sequence in request.sequences:
            token_ids = sequence.token_ids[num_prompt : num_prompt + generation.count_taken(sequence.index)]
            logprobs = make_logprobs(generation.get_logprobs(sequence.index))
            offer = offers.get(sequence.index, b"")
            handed.outputs.add(token_ids=token_ids.tolist(), logprobs=logprobs, offer=offer)
    handed.prompt_logprobs.extend(make_logprobs(generation.prompt_logprobs))


def add_age(handed: pb.HandedRequest, generation: Generation) -> None:
    """Add how long ago a request came, and how long its first token took."""
    handed.age_ms = int((time.monotonic() - generation.started_at) * 1000)
    if generation.first_token_at is not None:
        handed.first_token_ms = int((generation.first_token_at - generation.started_at) * 1000)


def parse_offers(handed: pb.HandedRequest) -> dict[int, bytes]:
    """The offers of its sequences, by index."""
    return {index: output.offer for index, output in enumerate(handed.outputs) if output.offer}


async def replay(handed: pb.HandedRequest, vocab_size: int, generation: Generation) -> None:
    """Bring a generation that is not queued yet to where it was in the engine before. Raises InvalidField, WrongTokenId."""
    request = generation.request
    generation.started_at -= handed.age_ms / 1000
    if handed.HasField("usage"):
        request.num_hit_tokens = handed.usage.cached_tokens
        request.num_copied_blocks, request.num_preemptions = handed.usage.copied_blocks, handed.usage.num_preemptions
    if handed.HasField("first_token_ms"):
        generation.first_token_at = generation.started_at + handed.first_token_ms / 1000
    generation.take_prompt_logprobs(1, _logprobs(handed.prompt_logprobs))
    if not handed.outputs:
        return
    if generation.sends_all_at_the_end or len(handed.outputs) != request.n:
        raise InvalidField("outputs: one for each continuation, and none where nothing was sent", field="outputs")
    held = []
    for index, output in enumerate(handed.outputs):
        token_ids = token_array(output.token_ids, vocab_size, "outputs.token_ids")
        has_ended = await _replay_output(generation, index, token_ids.tolist(), _logprobs(output.logprobs))
        held.append(HeldTokens(index, np.concatenate((request.prompt, token_ids)), has_ended))
    if not generation.is_open:
        raise InvalidField("outputs: the request has ended with them", field="outputs")
    now = time.monotonic()
    generation.last_token_at.update({one.index: now for one in held if len(one.token_ids) > len(request.prompt)})
    request.start_over(held)


async def _replay_output(generation: Generation, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
    """Whether the continuation ended with its last token."""
    if logprobs and len(logprobs) != len(token_ids):
        raise InvalidField("outputs.logprobs: one for each token, or none", field="outputs.logprobs")
    for place, token_id in enumerate(token_ids):
        if place % _TOKENS_A_TURN == 0:
            await asyncio.sleep(0)
        if not generation.is_open:
            break  # reported by the caller
        if generation.take_token(index, token_id, logprobs[place] if logprobs else None):
            if place + 1 < len(token_ids):
                raise InvalidField("outputs.token_ids: tokens behind the end", field="outputs.token_ids")
            return True
    return False


def _logprobs(messages: Iterable[pb.TokenLogprobs]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(one.token_id, one.logprob, one.rank, tuple(one.top_token_ids), tuple(one.top_logprobs))
        for one in messages
    ]
