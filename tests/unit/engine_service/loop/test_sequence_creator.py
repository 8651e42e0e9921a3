"""Calls that create sequences beside the steps, where the session is lost under several of them."""

import asyncio
import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from kvkeeper.client.errors import KvkeeperError
from kvkeeper.engine_service.loop.sequence_creator import SequenceCreator
from kvkeeper.engine_service.loop.wake import Wake


async def test_each_call_of_a_lost_session_is_told_to_the_loop_alone() -> None:
    untold: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: untold.append(context))
    waiting = [SimpleNamespace(request=None, token_ids=[1]) for _ in range(3)]
    are_asked = asyncio.Barrier(len(waiting))

    async def create_sequence(_: object) -> int:
        await are_asked.wait()  # so that they all fail in one turn of the loop
        raise KvkeeperError(grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", "another run of the service")

    scheduler = SimpleNamespace(
        next_to_create=lambda: waiting.pop() if waiting else None,
        waiting=SimpleNamespace(create_refused=lambda sequence, try_again: None),
    )
    memory = SimpleNamespace(create_sequence=create_sequence)
    tracing = SimpleNamespace(within_request=lambda _: nullcontext())
    wake = Wake()
    parts = (scheduler, memory, wake, lambda request, error: None, tracing)
    creator = SequenceCreator(*(cast(Any, part) for part in parts))
    await wake.loop.wait()
    with pytest.raises(KvkeeperError, match="STALE_EPOCH"):
        creator.proceed()
    await creator.close()
    del creator
    gc.collect()
    await asyncio.sleep(0)
    assert untold == [], "an error of a call that nobody has taken is printed with its traceback"
