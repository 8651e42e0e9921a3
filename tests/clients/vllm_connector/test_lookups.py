"""Look-ups of the connector for vLLM: they never make vLLM wait, go out together, and count as misses where nothing answers."""

import asyncio
from collections.abc import Iterator, Sequence

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.server import RunningServer
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.vllm.backoff import Backoff
from kvkeeper.vllm.lookups import Lookups, PoolMatcher
from kvkeeper.vllm.orders import Scope, TokenIds
from tests.support.stand_ins.vllm_worker import SPEC, Worker, other_rank, tokens_of

DEADLINE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class Scripted:
    """A cache service that a test scripts: it answers with the number of tokens, or fails."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.num_connects = self.num_closed = 0
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.extra = 0

    async def connect(self) -> "Scripted":
        self.num_connects += 1
        if self.failure is not None:
            raise self.failure
        return self

    async def match(self, prompts: Sequence[tuple[TokenIds, str]]) -> list[int]:
        self.batches.append(len(prompts))
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return [len(token_ids) + self.extra for token_ids, _ in prompts]

    async def renew(self) -> None:
        pass

    async def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service() -> Scripted:
    return Scripted()


@pytest.fixture
def lookups(service: Scripted, clock: Clock) -> Iterator[Lookups]:
    made = Lookups(service.connect, 5.0, Backoff(1.0, 4.0), clock.now)
    yield made
    made.close()


def let_run(lookups: Lookups) -> None:
    """What waits on the look-ups' thread has run once."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), lookups._loop).result(DEADLINE_S)


def answer(lookups: Lookups, request_id: str) -> int:
    """The answer once it is there; the deadline of the test run ends an endless wait."""
    while (found := lookups.answer(request_id)) is None:
        let_run(lookups)
    return found


def ask(lookups: Lookups, request_id: str, num_tokens: int) -> None:
    lookups.ask(request_id, np.zeros(num_tokens, np.int32), Scope())


def hold(lookups: Lookups, service: Scripted) -> asyncio.Event:
    """The service answers nothing until the event is set on the look-ups' loop."""
    service.gate = asyncio.Event()
    return service.gate


def release(lookups: Lookups, gate: asyncio.Event) -> None:
    lookups._loop.call_soon_threadsafe(gate.set)


def test_what_is_asked_while_a_batch_is_under_way_goes_out_together(lookups: Lookups, service: Scripted) -> None:
    gate = hold(lookups, service)
    ask(lookups, "first", 1)
    while not service.batches:
        let_run(lookups)
    for number in range(5):
        ask(lookups, str(number), number)
    assert lookups.answer("first") is None, "vLLM is not kept waiting"
    release(lookups, gate)
    assert [answer(lookups, str(number)) for number in range(5)] == [0, 1, 2, 3, 4]
    assert service.batches == [1, 5]
    assert service.num_connects == 1


def test_an_answer_that_takes_too_long_is_a_miss(lookups: Lookups, service: Scripted, clock: Clock) -> None:
    gate = hold(lookups, service)
    ask(lookups, "a", 8)
    clock.time += 4.9
    assert lookups.answer("a") is None
    clock.time += 0.2
    assert lookups.answer("a") == 0
    release(lookups, gate)


@pytest.mark.parametrize(
    "failure", [KvkeeperError(grpc.StatusCode.UNAVAILABLE), TimeoutError(), OSError(), ZeroDivisionError()], ids=repr
)
def test_a_lost_service_is_a_miss_and_tried_again_after_pauses_that_grow(
    lookups: Lookups, service: Scripted, clock: Clock, failure: Exception
) -> None:
    service.failure = failure
    tries = []
    for number in range(16):
        ask(lookups, str(number), 8)
        assert answer(lookups, str(number)) == 0
        tries.append(service.num_connects)
        clock.time += 0.5
    assert [tries.index(count) / 2 for count in (1, 2, 3, 4)] == [0, 1, 3, 7], "seconds"
    assert service.num_connects == 4
    service.failure = None
    clock.time += 4
    ask(lookups, "back", 8)
    assert answer(lookups, "back") == 8


def test_pauses_grow_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(1.0, 4.0)
    assert [backoff.failed(0.0) for _ in range(4)] == [1, 2, 4, 4]
    assert (backoff.may_try(3.9), backoff.may_try(4.0)) == (False, True)
    backoff.succeeded()
    assert backoff.may_try(0.0)
    assert backoff.failed(0.0) == 1


def test_a_connection_that_breaks_is_closed_and_opened_again(lookups: Lookups, service: Scripted, clock: Clock) -> None:
    ask(lookups, "a", 8)
    assert answer(lookups, "a") == 8
    service.failure = KvkeeperError(grpc.StatusCode.NOT_FOUND, "UNKNOWN_SESSION")
    ask(lookups, "b", 8)
    assert answer(lookups, "b") == 0
    assert service.num_closed == 1
    service.failure = None
    clock.time += 1.1
    ask(lookups, "c", 8)
    assert (answer(lookups, "c"), service.num_connects) == (8, 2)


def test_an_old_answer_is_used_once_and_then_asked_for_again(lookups: Lookups, service: Scripted, clock: Clock) -> None:
    ask(lookups, "a", 8)
    while not service.batches or lookups.answer("a") is None:
        let_run(lookups)
    clock.time += 0.9
    assert lookups.answer("a") == 8
    service.extra = 4
    clock.time += 0.2
    assert lookups.answer("a") is None
    assert answer(lookups, "a") == 12
    assert service.batches == [1, 1]


def test_a_first_answer_is_used_however_old_it_is(lookups: Lookups, service: Scripted, clock: Clock) -> None:
    ask(lookups, "a", 8)
    while lookups._asked["a"].num_tokens is None:
        let_run(lookups)
    clock.time += 60
    assert lookups.answer("a") == 8, "else a scheduler whose steps take long would ask for ever"


def test_a_forgotten_request_is_answered_for_with_nothing(lookups: Lookups, service: Scripted) -> None:
    gate = hold(lookups, service)
    ask(lookups, "a", 8)
    lookups.forget("a")
    release(lookups, gate)
    assert lookups.answer("a") == 0
    assert not lookups._asked and not lookups._prompts


async def test_a_prefix_counts_as_far_as_all_ranks_have_it(cache_server: RunningServer) -> None:
    """And scopes share nothing."""
    ranks = [SPEC, other_rank()]
    for spec, num_blocks in zip(ranks, (3, 2), strict=True):
        await asyncio.to_thread(_store, cache_server.address, spec, num_blocks)
    matcher = await PoolMatcher.connect(cache_server.address, ranks, 5.0, "test")
    prompt = tokens_of(5)
    asked = [(prompt, Scope()), (prompt[::-1].copy(), Scope())]
    assert await matcher.match([*asked, (prompt, Scope("ad" * 32)), (prompt, Scope("", "salt"))]) == [
        2 * SPEC.block_size,
        0,
        0,
        0,
    ]
    await matcher.renew()
    await matcher.close()
    assert not cache_server.session_manager.sessions


async def test_what_lies_below_the_host_tier_alone_is_not_promised_to_vllm() -> None:
    """It is not there when the load begins."""
    found = pb.MatchPrefixResponse(num_matched_tokens=60, num_host_tokens=8, num_disk_tokens=12, num_remote_tokens=16)

    class Session:
        async def match_prefix(self, token_ids: object, adapter: str, cache_salt: str) -> pb.MatchPrefixResponse:
            return found

    matcher = PoolMatcher(None, [Session()])  # type: ignore[arg-type, list-item]
    assert await matcher.match([(tokens_of(5), Scope())]) == [32]


def _store(address: str, spec: object, num_blocks: int) -> None:
    worker = Worker(address, spec)  # type: ignore[arg-type]
    worker.store("a", tokens_of(num_blocks), range(num_blocks))
    worker.close()
