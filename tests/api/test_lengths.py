"""How long a sequence may be, by all flags: what is advertised works in every call, and one token more in none.

A token id may be any below 2^31, so the longest messages are those of the largest ids.
"""

import random
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import DEADLINE, Api, Session, le32, le64, refusal, serving

LARGEST_ID = 2**31 - 1
BLOCK_SIZE = 1024
SPEC = pb.KvSpec(
    model_id="long",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    kv_dtype=pb.KV_DTYPE_FLOAT16,
    block_size=BLOCK_SIZE,
    layout=pb.KV_LAYOUT_BLOCK_MAJOR,
)
NOW, NEVER = pb.ADMISSION_VERDICT_NOW, pb.ADMISSION_VERDICT_NEVER


def small(seed: int) -> tuple[dict[str, int], int]:
    """Flags, and the blocks of a pool."""
    rng = random.Random(seed)
    flags = {"max_tokens_per_sequence": rng.choice([1, 2, 1023, 1024, 1025, 9000]), "max_sequences": rng.choice([1, 7, 30_000])}
    kept = {name: value for name, value in flags.items() if rng.random() < 0.7}
    return kept, rng.choice([2, 3, 9, 40])


CASES: list[tuple[dict[str, int], int]] = [
    ({}, 1025),  # 1 Mi tokens, without a flag
    ({"max_tokens_per_sequence": 1 << 22}, 4097),
    ({"max_sequences": 20_000}, 4097),
    *map(small, range(8)),
]


@pytest.mark.parametrize(("flags", "num_blocks"), CASES)
async def test_what_is_advertised_works_and_no_more(flags: dict[str, int], num_blocks: int) -> None:
    pool_tokens = (num_blocks - 1) * BLOCK_SIZE
    async with serving(num_blocks=num_blocks, **flags) as api:
        session = await api.open(spec=SPEC)
        capabilities = await api.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=DEADLINE)
        limit = session.opened.pool.max_tokens_per_sequence
        assert limit == min(pool_tokens, capabilities.max_tokens_per_sequence)
        assert capabilities.max_tokens_per_sequence == flags.get("max_tokens_per_sequence", 1 << 22)
        calls = calls_of(session, capabilities.max_prompt_message_bytes)
        assert {await call(limit) for call in calls} == {"OK"}
        assert {await call(limit + 1) for call in calls} <= {"NEVER_FITS", "NEVER", "found nothing"}
        await api.audit()
        answer = await session.step(1, **starts(1, limit))
        assert np.frombuffer(answer.start_results, "<i4").tolist() == [pb.START_RESULT_STARTED]
        assert np.frombuffer(answer.start_num_reserved_tokens, "<i4").tolist() == [limit]


def calls_of(session: Session, max_message_bytes: int) -> list[Any]:
    """Each call that takes a prompt, with one of so many tokens: what becomes of it in a word."""

    async def told(method: str, request: Any) -> Any:
        assert request.ByteSize() <= max_message_bytes or method in ("MatchPrefix", "ExplainMatch", "PinPrefix")
        return await getattr(session.api.stub, method)(request, timeout=6 * DEADLINE)

    async def admission(num_tokens: int) -> str:
        verdicts = set()
        for prompt in ({"num_prompt_tokens": num_tokens}, {"token_ids": ids(num_tokens)}):
            answer = await told("CheckAdmission", pb.CheckAdmissionRequest(**session.ids, **prompt))
            verdicts.add(answer.verdict)
            assert answer.limit_tokens == session.opened.pool.max_tokens_per_sequence
        assert verdicts in ({NOW}, {NEVER})
        return "OK" if verdicts == {NOW} else "NEVER"

    async def create(num_tokens: int) -> str:
        packed = np.full(num_tokens, LARGEST_ID, "<i4").tobytes()
        ends = set()
        for prompt in ({"packed_token_ids": packed}, {"token_ids": ids(num_tokens)}):
            request = pb.CreateSequenceRequest(**session.ids, sequence_id=1, **prompt)
            ends.add(await word(told("CreateSequence", request)))
            many = pb.CreateSequencesRequest(**session.ids, sequences=[pb.NewSequence(sequence_id=1, **prompt)])
            (result,) = (await told("CreateSequences", many)).results
            ends.add("NEVER_FITS" if result.HasField("error") else "OK")
        (end,) = ends
        return end

    def looks_up(method: str, **fields: Any) -> Any:
        async def look_up(num_tokens: int) -> str:
            request = getattr(pb, f"{method}Request")(**session.ids, token_ids=ids(num_tokens), **fields)
            end = await word(told(method, request))
            is_longer = num_tokens > session.opened.pool.max_tokens_per_sequence
            return "found nothing" if is_longer and end == "OK" else end

        return look_up

    return [admission, create, *map(looks_up, ("MatchPrefix", "ExplainMatch"))]


async def word(call: Any) -> str:
    try:
        await call
    except grpc.RpcError as error:
        return (await refusal(_again(error))).reason
    return "OK"


async def _again(error: grpc.RpcError) -> None:
    raise error


def ids(num_tokens: int) -> list[int]:
    return [LARGEST_ID] * num_tokens


def starts(sequence_id: int, num_tokens: int) -> dict[str, bytes]:
    return {
        "start_sequence_ids": le64(sequence_id),
        "start_max_new_tokens": le32(num_tokens),
        "start_max_hit_tokens": le32(0),
    }


@pytest.mark.parametrize("method", ["MatchPrefix", "ExplainMatch", "PinPrefix", "HintPrefix"])
async def test_a_look_up_is_not_read_where_it_is_far_longer_than_any_sequence(api: Api, method: str) -> None:
    """A prompt that is somewhat longer finds what there is of it; one of 800,000 tokens would hold up all sessions."""
    session = await api.open()

    def fields(token_ids: Sequence[int]) -> dict[str, Any]:
        if method == "HintPrefix":
            return {"hints": [pb.PrefixHint(token_ids=token_ids)]}
        return {"token_ids": token_ids, **({"ttl_ms": 1000} if method == "PinPrefix" else {})}

    limit = session.opened.pool.max_tokens_with_retention
    await session.call(method, **fields(range(4 * limit)))
    error = await refusal(session.call(method, **fields(ids(800_000))))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.metadata == {"field": "request", "limit": str(256 << 10)}


@pytest.mark.parametrize("num_bytes", [5 << 20, 20 << 20, 22 << 20, 100 << 20])
async def test_a_message_that_is_too_large_is_refused_with_the_limit_whoever_sees_it(api: Api, num_bytes: int) -> None:
    session = await api.open()
    error = await refusal(session.call("CreateSequence", sequence_id=1, packed_token_ids=bytes(num_bytes)))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "request")
    assert int(error.metadata["limit"]) >= 4 << 20
