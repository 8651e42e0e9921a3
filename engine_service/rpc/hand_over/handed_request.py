"""Requests on their way from one engine to another: a generation as a HandedRequest, and its tokens back into a new generation.

A generation is a function of its request and its tokens. So the engine that takes over feeds the tokens to it again, one by
one: text, stop strings, constraints and counts come out as they were, and its output is the same, chunk by chunk.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping

import numpy as np

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ...outputs.generation import Generation
from ...values.errors import InvalidField
from ...values.request import HeldTokens
from ...values.token_logprobs import TokenLogprobs
from ..decode_request import token_array
from ..encode_chunk import logprobs_of, usage_of

_TOKENS_A_TURN = 256  # that are replayed before other tasks have their turn


def handed_request(
    generation: Generation, message: pb.GenerateRequest, digest: bytes, offers: Mapping[int, bytes]
) -> pb.HandedRequest:
    """A request that was taken out of the steps. message: as it is carried out; digest: of its submission, or empty;
    offers: of its sequences, by index.
    """
    request, age_s = generation.request, time.monotonic() - generation.started_at
    handed = pb.HandedRequest(request=message, age_ms=int(age_s * 1000), submission_digest=digest)
    if generation.first_token_at is not None:
        handed.first_token_ms = int((generation.first_token_at - generation.started_at) * 1000)
    if request.num_hit_tokens is not None:
        handed.usage.CopyFrom(usage_of(generation.usage))
    if (generation.num_taken or offers) and not generation.sends_all_at_the_end:
        num_prompt = len(request.prompt)
        for sequence in request.sequences:
            token_ids = sequence.token_ids[num_prompt : num_prompt + generation.num_taken_of(sequence.index)]
            logprobs = logprobs_of(generation.logprobs_of(sequence.index))
            offer = offers.get(sequence.index, b"")
            handed.outputs.add(token_ids=token_ids.tolist(), logprobs=logprobs, offer=offer)
    if not generation.sends_all_at_the_end:
        handed.prompt_logprobs.extend(logprobs_of(generation.prompt_logprobs))
    return handed


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
            break  # told by the caller
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
