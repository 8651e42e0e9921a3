"""What one call writes of its many requests: the tokens of each in order and once, and what can wait not beside what cannot."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.rpc.stream_pace import StreamPace
from kvkeeper.engine_service.serving import streams
from kvkeeper.engine_service.serving.stream_buffer import StreamBuffer
from kvkeeper.engine_service.serving.streams import ManyRequests
from kvkeeper.engine_service.values.errors import RequestFailed
from kvkeeper.engine_service.values.output_chunk import OutputChunk, Usage
from kvkeeper.engine_service.values.request import FinishReason

END, MAX_TOKENS = 0, 60  # a token that stands for the end, and most tokens of a request


class Timers:
    """A loop's clock that stands still; rounds come when they are called."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def time(self) -> float:
        return 0.0

    def call_at(self, when: float, work: Callable[[], None]) -> object:
        self.due.append(work)
        return work

    def round(self) -> None:
        due, self.due = self.due, []
        for work in due:
            work()


class Asked:
    """A request of which a test puts the output."""

    def __init__(self, request_id: str, unread: StreamBuffer) -> None:
        self.request_id, self.unread = request_id, unread
        self.num_tokens = 0

    def cancel(self) -> None: ...


class Call:
    """A GenerateMany call with so many requests, whose tokens are put by hand; and what was written."""

    def __init__(self, num_requests: int) -> None:
        self.timers = Timers()
        self.asked: list[Asked] = []
        self.written: list[pb.GenerateManyResponse] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        pace = StreamPace(1.0, lambda: cast(Any, self.timers))
        self.many = ManyRequests(self._admit, pace, 4 << 20, lambda: RequestFailed("a bug"))
        self._num_requests = num_requests
        self.serving = asyncio.create_task(self.many.serve(self._read(), self._write))

    async def _read(self) -> AsyncIterator[pb.GenerateManyRequest]:
        begin = [pb.NumberedRequest(number=number) for number in range(self._num_requests)]
        yield pb.GenerateManyRequest(begin=begin, reads_parts=True)

    async def _admit(self, message: pb.GenerateRequest, unread: StreamBuffer) -> Asked:
        self.asked.append(Asked(f"r{len(self.asked)}", unread))
        return self.asked[-1]

    async def _write(self, message: pb.GenerateManyResponse) -> None:
        await self.may_write.wait()
        self.written.append(message)

    async def put(self, number: int, token_id: int) -> None:
        """The next token of a request: the first as a chunk, the end as one without tokens, others alone."""
        asked = self.asked[number]
        if token_id == END:
            asked.unread.put(OutputChunk(0, "", (), FinishReason.STOP, Usage(3, 0, asked.num_tokens, 0, 0)))
        elif not asked.num_tokens:
            asked.unread.put(OutputChunk(0, "", (token_id,)))
        else:
            asked.unread.add([token_id], [""])
        asked.num_tokens += 1

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    def tokens(self) -> dict[int, list[int]]:
        """Of all that was written, the tokens by request."""
        found: dict[int, list[int]] = defaultdict(list)
        for message in self.written:
            token_ids = list(message.parts.token_ids)
            for one in message.responses:
                found[one.number] += one.response.token_ids
            for number, count in zip(message.parts.numbers, message.parts.num_tokens, strict=True):
                assert number not in {one.number for one in message.responses}
                found[number] += token_ids[:count]
                del token_ids[:count]
            assert not token_ids
        return found


async def test_a_first_token_and_an_end_are_written_without_what_waits_for_a_round() -> None:
    call = Call(3)
    await call.settle()
    for number in (0, 1):
        await call.put(number, 5)
    await call.settle()
    assert call.tokens() == {0: [5], 1: [5]}, "first tokens at once"
    for _ in range(3):
        await call.put(0, 6)
    await call.put(2, 7)
    await call.put(1, END)
    await call.settle()
    assert call.tokens() == {0: [5], 1: [5], 2: [7]}
    assert [one.number for one in call.written[-1].responses if one.response.HasField("usage")] == [1]
    call.timers.round()
    await call.settle()
    assert call.tokens() == {0: [5, 6, 6, 6], 1: [5], 2: [7]}
    assert list(call.written[-1].parts.numbers) == [0]
    for number in (0, 2):
        await call.put(number, END)
    await call.serving


class TokensFirst(Call):
    """Its requests give tokens before their admission is heard of, as one of another process may."""

    async def _admit(self, message: pb.GenerateRequest, unread: StreamBuffer) -> Asked:
        asked = await super()._admit(message, unread)
        number = len(self.asked) - 1
        for token_id in (5, 6, END):
            await self.put(number, token_id)
            await self.settle()
        return asked


async def test_tokens_may_come_before_the_admission_is_heard_of() -> None:
    call = TokensFirst(3)
    await call.serving
    assert call.tokens() == {number: [5, 6] for number in range(3)}
    assert {one.response.request_id for message in call.written for one in message.responses} == {"r0", "r1", "r2"}


@pytest.mark.parametrize("seed", range(8))
async def test_tokens_come_in_order_and_once_however_slowly_they_are_written(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MOST_UNITS", 4)
    dice, count = random.Random(seed), 4
    call, expected = Call(count), defaultdict[int, list[int]](list)
    await call.settle()
    for token_id in range(1, 150):
        for _ in range(dice.randrange(6)):
            number = dice.randrange(count)
            if len(expected[number]) < MAX_TOKENS - 1:
                expected[number].append(token_id)
                await call.put(number, token_id)
        if dice.random() < 0.3:
            call.timers.round()
        (call.may_write.set if dice.random() < 0.5 else call.may_write.clear)()
        for _ in range(dice.randrange(4)):
            await asyncio.sleep(0)
    call.may_write.set()
    for number in range(count):
        await call.put(number, END)
    await call.serving
    assert call.tokens() == expected
    assert any(message.parts.numbers for message in call.written)
