"""Calls that create sequences beside the steps: what goes together, what is tried again, and a session that is lost."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from kvkeeper.client.errors import KvkeeperError
from kvkeeper.engine_service.loop import sequence_creator
from kvkeeper.engine_service.loop.between_steps import Wake
from kvkeeper.engine_service.loop.sequence_creator import SequenceCreator

LOST = KvkeeperError(grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", "another run of the service")
NO_SLOT = KvkeeperError(grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_SEQUENCES", "all are in use")
BAD = KvkeeperError(grpc.StatusCode.INVALID_ARGUMENT, "NEVER_FITS", "too long")


class World:
    """A scheduler and a cache service of which every call waits for the test."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.calls: asyncio.Queue[tuple[list[int], asyncio.Future[list[Any]]]] = asyncio.Queue()
        self.created: list[int] = []
        self.refused: list[tuple[int, bool]] = []  # and whether they are tried again
        self.failed: list[Any] = []
        self.wake = Wake()

    def put(self, *num_tokens: int) -> None:
        for num in num_tokens:
            request = SimpleNamespace(start_number=0)
            self.waiting.append(SimpleNamespace(request=request, token_ids=[0] * num))

    @asynccontextmanager
    async def creator(self) -> AsyncIterator[SequenceCreator]:
        async def create(sequences: Sequence[Any]) -> list[Any]:
            answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            self.calls.put_nowait(([len(sequence.token_ids) for sequence in sequences], answer))
            return await answer

        def refuse(sequence: Any, *, try_again: bool) -> None:
            self.refused.append((len(sequence.token_ids), try_again))
            if try_again:
                self.waiting.insert(0, sequence)

        queue = SimpleNamespace(
            created=lambda sequence: self.created.append(sequence.request.start_number),
            create_refused=refuse,
        )
        scheduler = SimpleNamespace(
            next_to_create=lambda: self.waiting.pop(0) if self.waiting else None,
            num_waiting=1,
            waiting=queue,
        )
        fail: Callable[..., None] = lambda request, error: self.failed.append(error)  # noqa: E731
        tracing = SimpleNamespace(within_request=lambda *requests: nullcontext())
        parts = (scheduler, create, self.wake, fail, tracing)
        creator = SequenceCreator(*(cast(Any, part) for part in parts))
        try:
            yield creator
        finally:
            await creator.close()

    async def call(self) -> tuple[list[int], asyncio.Future[list[Any]]]:
        async with asyncio.timeout(5):
            return await self.calls.get()


async def test_what_waits_goes_together_and_what_comes_meanwhile_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.put(3, 4, 5)
    async with world.creator() as creator:
        sizes, answer = await world.call()
        assert sizes == [3, 4, 5]
        world.put(6)
        creator.proceed()
        world.put(7)
        creator.proceed()
        await asyncio.sleep(0)
        assert world.calls.empty(), "one call is under way"
        answer.set_result([11, 12, 13])
        sizes, answer = await world.call()
        assert (sizes, world.created) == ([6, 7], [11, 12, 13])


async def test_a_call_has_so_many_sequences_and_tokens_and_a_long_prompt_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequence_creator, "_MOST_IN_CALL", 3)
    monkeypatch.setattr(sequence_creator, "_MOST_TOKENS_IN_CALL", 10)
    monkeypatch.setattr(sequence_creator, "_MOST_CALLS", 3)
    world = World()
    world.put(1, 1, 1, 4, 6, 1, 25, 26, 2, 9, 27)
    async with world.creator():
        for expected in ([1, 1, 1], [4, 6], [1]):
            sizes, answer = await world.call()
            assert sizes == expected, "in order, and a long one alone"
            assert world.calls.empty(), "others gather meanwhile"
            answer.set_result([0] * len(sizes))
        sizes, _ = await world.call()
        assert sizes == [25]
        assert (await world.call())[0] == [26]
        sizes, answer = await world.call()
        assert sizes == [2], "beside the long ones"
        answer.set_result([0])
        sizes, answer = await world.call()
        assert sizes == [9], "once that has ended"
        await asyncio.sleep(0)
        assert world.calls.empty()


async def test_what_was_kept_for_the_next_call_waits_for_a_slot_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_creator, "_MOST_TOKENS_IN_CALL", 10)
    monkeypatch.setattr(sequence_creator, "_RETRY_S", 0)
    world = World()
    world.put(4, 5, 8)
    async with world.creator():
        sizes, answer = await world.call()
        answer.set_result([1, NO_SLOT])
        assert sizes == [4, 5]
        sizes, answer = await world.call()
        assert world.refused == [(5, True), (8, True)]
        assert world.wake.loop.is_set(), "a sequence that holds a slot may have to be preempted"
        assert sizes == [8], "the queue says which is next"
        answer.set_result([2])
        assert (await world.call())[0] == [5]


async def test_a_refusal_ends_its_request_alone() -> None:
    world = World()
    world.put(4, 5, 6)
    async with world.creator():
        _, answer = await world.call()
        answer.set_result([1, BAD, 2])
        async with asyncio.timeout(5):
            await world.wake.loop.wait()
        assert (world.created, world.refused) == ([1, 2], [(5, False)])
        assert [error.reason for error in world.failed] == ["REQUEST_FAILED"]


@pytest.mark.parametrize("is_of_one", [False, True])
async def test_each_call_of_a_lost_session_is_told_to_the_loop_alone(monkeypatch: pytest.MonkeyPatch, is_of_one: bool) -> None:
    untold: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: untold.append(context))
    monkeypatch.setattr(sequence_creator, "_MOST_TOKENS_IN_CALL", 0)  # each is long
    world = World()
    world.put(1, 2, 3)
    async with world.creator() as creator:
        answers = [(await world.call())[1] for _ in range(3)]
        for answer in answers:  # so that they all fail in one turn of the loop
            if is_of_one:
                answer.set_result([LOST])
            else:
                answer.set_exception(LOST)
        async with asyncio.timeout(5):
            await world.wake.loop.wait()
        with pytest.raises(KvkeeperError, match="STALE_EPOCH"):
            creator.proceed()
    del creator
    gc.collect()
    await asyncio.sleep(0)
    assert untold == [], "an error of a call that was not taken is printed with its traceback"


async def test_a_wait_for_slots_that_lasts_is_logged_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(sequence_creator, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(sequence_creator, "_RETRY_S", 0)
    world = World()
    world.put(3)
    with capture_logs() as logs:
        async with world.creator():
            _, answer = await world.call()
            for now, result, num_logs in (
                (100.0, NO_SLOT, 0),
                (100.9, NO_SLOT, 0),
                (101.0, NO_SLOT, 1),
                (105.0, NO_SLOT, 1),
                (111.0, NO_SLOT, 2),
                (130.0, 7, 2),  # and then there is a slot
                (130.0, NO_SLOT, 2),
                (131.0, NO_SLOT, 3),
            ):
                if result == 7:
                    world.put(4)
                answer.set_result([result])
                _, answer = await world.call()  # the last one is judged by now
                assert len(logs) == num_logs, now
    assert logs[0]["message"] == NO_SLOT.message
