"""CreateSequences: many prompts in one call, each with an answer or a refusal of its own."""

from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import KvkeeperError, parse_error
from tests.support.worlds.cache_api import Api, Session, le32, le64, refusal, serving

Outcome = pb.CreateSequenceResponse | KvkeeperError


async def create(session: Session, *new: dict[str, Any]) -> list[Outcome]:
    answer = await session.call("CreateSequences", sequences=new)
    return [
        result.response if result.WhichOneof("result") == "response" else parse_error(result.error) for result in answer.results
    ]


def reasons(outcomes: list[Outcome]) -> list[str]:
    return [outcome.reason if isinstance(outcome, KvkeeperError) else "" for outcome in outcomes]


async def test_each_is_created_as_if_alone_and_starts_with_the_others(api: Api) -> None:
    session = await api.open()
    outcomes = await create(
        session,
        {"sequence_id": 1, "token_ids": [1, 2, 3, 4, 5]},
        {"sequence_id": 2, "packed_token_ids": le32(6, 7), "max_tokens": 9, "priority": -3},
        {"sequence_id": 3, "token_ids": [8], "tenant": "acme", "reuse_hint": pb.REUSE_HINT_NONE},
        {"sequence_id": 4, "token_ids": [9], "retention": pb.Retention(num_sink_tokens=4, num_window_tokens=8)},
    )
    numbers = [outcome.start_number for outcome in outcomes if not isinstance(outcome, KvkeeperError)]
    assert len(numbers) == 4 and numbers == sorted(set(numbers))
    shown = [(await session.call("GetSequence", sequence_id=place, include_tokens=True)).sequence for place in range(1, 5)]
    assert [list(each.token_ids) for each in shown] == [[1, 2, 3, 4, 5], [6, 7], [8], [9]]
    assert [each.start_number for each in shown] == numbers
    assert (shown[1].max_tokens, shown[1].priority, shown[2].reuse_hint) == (9, -3, pb.REUSE_HINT_NONE)
    assert (shown[3].retention.num_sink_tokens, shown[3].retention.num_window_tokens) == (4, 8)
    most = le32(*[8] * 4)
    columns = {"start_max_new_tokens": most, "start_max_hit_tokens": most}
    answer = await session.step(1, start_sequence_ids=le64(1, 2, 3, 4), **columns)
    assert answer.start_results == le32(*[pb.START_RESULT_STARTED] * 4)


async def test_a_repeat_changes_nothing_and_other_arguments_are_refused(api: Api) -> None:
    session = await api.open()
    new = [{"sequence_id": place, "token_ids": [place, 2]} for place in (1, 2)]
    assert await create(session, *new) == await create(session, *new)
    outcomes = await create(session, new[0], {**new[1], "priority": 1}, {"sequence_id": 3, "token_ids": [3]})
    assert reasons(outcomes) == ["", "DUPLICATE_SEQUENCE", ""]


async def test_one_that_is_refused_leaves_the_others_be(api: Api) -> None:
    session = await api.open()
    outcomes = await create(
        session,
        {"sequence_id": 0, "token_ids": [1]},
        {"sequence_id": 1, "token_ids": [1] * 4097},
        {"sequence_id": 2, "token_ids": [1, 2]},
        {"sequence_id": 3},
        {"sequence_id": 4, "token_ids": [1], "start_number": 2**40},
        {"sequence_id": 5, "token_ids": [1, 2]},
    )
    assert reasons(outcomes) == ["INVALID_FIELD", "NEVER_FITS", "", "INVALID_FIELD", "INVALID_FIELD", ""]
    told = [outcome.metadata for outcome in outcomes if isinstance(outcome, KvkeeperError)]
    assert [metadata.get("field") for metadata in told] == ["sequence_id", None, "token_ids", "start_number"]
    assert told[1]["limit"] == "1360"
    assert (await api.stats()).pools[0].num_waiting_sequences == 2


async def test_those_beyond_the_last_slot_are_refused_each() -> None:
    async with serving(max_sequences=2) as api:
        session = await api.open()
        outcomes = await create(session, *({"sequence_id": place, "token_ids": [place]} for place in range(1, 5)))
        assert reasons(outcomes) == ["", "", "OUT_OF_SEQUENCES", "OUT_OF_SEQUENCES"]
        assert (await api.stats()).pools[0].num_waiting_sequences == 2


@pytest.mark.parametrize("num", [0, 257])
async def test_one_to_256_are_taken(api: Api, num: int) -> None:
    session = await api.open()
    error = await refusal(create(session, *({"sequence_id": place, "token_ids": [1]} for place in range(1, num + 1))))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "sequences")
    assert (await api.stats()).pools[0].num_waiting_sequences == 0


async def test_a_session_that_is_over_refuses_the_call(api: Api) -> None:
    session = await api.open()
    await session.call("CloseSession", drained=True)
    assert (await refusal(create(session, {"sequence_id": 1, "token_ids": [1]}))).reason == "UNKNOWN_SESSION"
