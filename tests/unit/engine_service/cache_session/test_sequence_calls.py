"""Sequences that are told to the cache service, all in one call."""

from typing import Any, cast

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import KvkeeperError, NewSequence
from kvkeeper.engine_service.cache_session.kv_memory import create_sequences
from kvkeeper.engine_service.values.request import Request, Retention, Sequence, SequenceState
from tests.support.worlds.cache_api import failure

REFUSED = KvkeeperError(grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_SEQUENCES", "all are in use")


def sequence(sequence_id: int, **fields: Any) -> Sequence:
    prompt = np.array([sequence_id, 5], np.int32)
    request = Request(f"r{sequence_id}", prompt, max_new_tokens=6, **fields)
    return Sequence(request, 0, prompt, SequenceState.CREATING, sequence_id)


class Session:
    """A session of a cache service that has no slot for sequence 2."""

    def __init__(self, error: KvkeeperError | None = None) -> None:
        self.error = error  # of the call of many
        self.num_calls = 0
        self.created: list[tuple[Any, ...]] = []

    async def create_sequences(self, new: list[NewSequence]) -> list[Any]:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        return [self._create(*(getattr(one, name) for name in NewSequence.__dataclass_fields__)) for one in new]

    def _create(self, sequence_id: int, token_ids: Any, *fields: Any) -> Any:
        self.created.append((sequence_id, token_ids.tolist(), *fields))
        return REFUSED if sequence_id == 2 else pb.CreateSequenceResponse(start_number=10 + sequence_id)


async def create(session: Session, *sequences: Sequence) -> list[int | KvkeeperError]:
    return await create_sequences(cast(Any, session), sequences)


async def test_all_go_in_one_call_with_what_their_requests_say() -> None:
    session = Session()
    one = sequence(1, tenant="acme", priority=3, retention=Retention(4, 8))
    two = sequence(2)
    two.request.start_number, two.request.retain_ms, two.request.cache_salt = 7, 9, "s"
    assert await create(session, one, two) == [11, REFUSED]
    assert session.num_calls == 1
    retention = pb.Retention(num_sink_tokens=4, num_window_tokens=8)
    first = (1, [1, 5], 8, "acme", 3, retention, 0, 0, 0, "", "")
    assert session.created == [first, (2, [2, 5], 8, "", 0, None, 7, 0, 9, "", "s")]


async def test_a_prompt_that_no_message_can_carry_is_refused_alone() -> None:
    too_large = KvkeeperError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "too large", {"field": "request"})
    assert await create(Session(too_large), sequence(1)) == [too_large]


@pytest.mark.parametrize("reason", ["STALE_EPOCH", ""])
async def test_a_lost_session_is_an_error_of_the_call(reason: str) -> None:
    code = grpc.StatusCode.FAILED_PRECONDITION if reason else grpc.StatusCode.UNAVAILABLE
    session = Session(KvkeeperError(code, reason))
    lost = await failure(create(session, sequence(1)))
    assert lost is session.error
    assert session.created == []
