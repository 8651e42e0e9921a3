"""Loads and stores of the connector for vLLM on a real cache service, with blocks whose bytes tell whose they are."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import pytest

from kvkeeper.cache_service.server import RunningServer
from kvkeeper.client import AsyncCacheClient
from kvkeeper.vllm.orders import Load, Orders, Scope, Store
from kvkeeper.vllm.pages import Pages
from kvkeeper.vllm.rounds import Job, Rounds
from tests.support.processes.fleet import fleet
from tests.support.stand_ins.vllm_worker import BLOCK_SIZE, DEADLINE_S, Gate, Worker, other_rank, tokens_of
from tests.support.worlds.cache_api import serving

T = TypeVar("T")
PROMPT = tokens_of(4)


@pytest.fixture
async def client(cache_server: RunningServer) -> AsyncIterator[AsyncCacheClient]:
    """Ends with an audit."""
    async with AsyncCacheClient(cache_server.address) as made:
        yield made
        assert not (await made.check_invariants()).violations


async def on_threads(work: Callable[..., T], *arguments: Any) -> T:
    """Work of vLLM's, which blocks, while the service runs on this thread."""
    return await asyncio.to_thread(work, *arguments)


def gated(gates: list[Gate]) -> Callable[[Pages], Gate]:
    """What puts a gate before pages, and notes it."""

    def wrap(pages: Pages) -> Gate:
        gates.append(Gate(pages))
        return gates[-1]

    return wrap


def closing(*workers: Worker) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for worker in workers:
        stack.callback(worker.close)
    return stack


class AnnouncedLock:
    """A lock that tells that a thread is about to wait for it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.is_wanted = threading.Event()

    def __enter__(self) -> None:
        self.is_wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


async def test_what_one_worker_stores_another_one_loads(cache_server: RunningServer, client: AsyncCacheClient) -> None:
    def work() -> None:
        one, other = Worker(cache_server.address), Worker(cache_server.address)
        with closing(one, other):
            one.store("a", PROMPT, [3, 9, 4, 7])
            finished = other.load("b", PROMPT, [5, 1, 2, 8])
            assert (finished.loaded, finished.failed_blocks) == ({"b"}, set())
            assert other.holds(PROMPT, [5, 1, 2, 8]) == [True] * 4
            assert other.rounds.counts.num_loaded_blocks == 4

    await on_threads(work)
    (pool,) = (await client.stats()).pools
    assert (pool.num_hit_tokens, pool.num_waiting_sequences + pool.num_running_sequences, pool.num_cached_blocks) == (16, 0, 4)


async def test_a_worker_that_has_the_first_blocks_loads_the_others(cache_server: RunningServer) -> None:
    def work() -> None:
        worker = Worker(cache_server.address)
        with closing(worker):
            worker.store("a", PROMPT, [3, 9, 4, 7])
            worker.load("b", PROMPT, [1, 2], first_block=2)
            assert worker.holds(PROMPT, [1, 2], first_block=2) == [True, True]
            assert not worker.blocks[[0, 5]].any()

    await on_threads(work)


async def test_a_longer_store_copies_only_what_is_new(cache_server: RunningServer) -> None:
    def work() -> None:
        copied: list[list[int]] = []

        def wrap(pages: Any) -> Any:
            store = pages.store
            pages.store = lambda block_ids, page_ids: (copied.append(list(block_ids)), store(block_ids, page_ids))
            return pages

        worker = Worker(cache_server.address, wrap=wrap)
        with closing(worker):
            longer = tokens_of(6)
            worker.store("a", longer[: 4 * BLOCK_SIZE], [3, 9, 4, 7])
            worker.store("a", longer, [3, 9, 4, 7, 5, 6])
            assert copied == [[3, 9, 4, 7], [5, 6]]
            assert worker.rounds.counts.num_stored_blocks == 6
            worker.load("b", longer, [10, 11, 12, 13, 14, 15])
            assert worker.holds(longer, range(10, 16)) == [True] * 6

    await on_threads(work)


async def test_blocks_that_are_gone_are_reported_and_the_others_loaded(cache_server: RunningServer) -> None:
    def work() -> None:
        worker = Worker(cache_server.address)
        with closing(worker):
            worker.store("a", PROMPT[: 2 * BLOCK_SIZE], [3, 9])
            finished = worker.load("b", PROMPT, [1, 2, 5, 6])
            assert (finished.loaded, finished.failed_blocks) == ({"b"}, {5, 6})
            assert worker.holds(PROMPT, [1, 2]) == [True, True]
            assert worker.transfers.take_finished().failed_blocks == set(), "told once"

    await on_threads(work)


async def test_adapters_salts_and_ranks_share_nothing(cache_server: RunningServer) -> None:
    def work() -> None:
        one, other = Worker(cache_server.address), Worker(cache_server.address, other_rank())
        with closing(one, other):
            one.store("a", PROMPT, [3, 9, 4, 7], scope=Scope("ad" * 32, "t"))
            assert other.load("b", PROMPT, [1, 2, 5, 6], scope=Scope("ad" * 32, "t")).failed_blocks == {1, 2, 5, 6}
            assert one.load("b", PROMPT, [1, 2, 5, 6]).failed_blocks == {1, 2, 5, 6}
            assert one.load("c", PROMPT, [1, 2, 5, 6], scope=Scope("ad" * 32, "t")).failed_blocks == set()

    await on_threads(work)


async def test_many_orders_of_a_step_are_one_round(cache_server: RunningServer, client: AsyncCacheClient) -> None:
    def work() -> None:
        worker = Worker(cache_server.address)
        with closing(worker):
            prompts = [tokens_of(2, first=100 * number) for number in range(5)]
            for number, prompt in enumerate(prompts):
                worker.store(str(number), prompt, [2 * number, 2 * number + 1])
            before = worker.rounds.counts.num_rounds
            orders = [
                Load(str(number), Scope(), prompt, 0, [12 + 2 * number, 13 + 2 * number])
                for number, prompt in enumerate(prompts)
            ]
            worker.transfers.submit(Orders(loads=orders))
            assert worker.transfers.wait(DEADLINE_S)
            assert worker.transfers.take_finished().loaded == {"0", "1", "2", "3", "4"}
            assert worker.rounds.counts.num_rounds == before + 1
            assert all(worker.holds(prompt, [12 + 2 * n, 13 + 2 * n]) == [True, True] for n, prompt in enumerate(prompts))

    await on_threads(work)
    assert (await client.stats()).pools[0].num_steps == 12, "two steps for each of six rounds"


async def test_more_orders_than_a_step_may_have_are_moved_all_the_same() -> None:
    def work(address: str) -> None:
        worker = Worker(address)
        rounds = Rounds(worker.connect, BLOCK_SIZE)
        with closing(worker), contextlib.closing(rounds):
            prompts = [tokens_of(1, first=1000 * number) for number in range(300)]
            worker.blocks[0] = 7
            rounds.run([Job(Store(f"r{number}", Scope(), prompt, [0])) for number, prompt in enumerate(prompts)])
            counts = rounds.counts
            assert (counts.num_stored_blocks, counts.num_lost_sessions) == (300, 0)
            worker.blocks[:] = 0
            rounds.run([Job(Load(f"r{number}", Scope(), prompt, 0, [number % 24])) for number, prompt in enumerate(prompts)])
            assert (counts.num_loaded_blocks, counts.num_failed_blocks) == (300, 0)
            assert (worker.blocks == 7).all()

    async with serving(max_sequences=1024, pool_memory=1 << 20) as api:
        await on_threads(work, api.server.address)
        await api.audit()


async def test_a_pool_that_is_too_small_evicts_or_drops_and_goes_on(
    cache_server: RunningServer, client: AsyncCacheClient
) -> None:
    num_blocks = 31

    def work() -> None:
        worker = Worker(cache_server.address)
        with closing(worker):
            for number in range(20):
                prompt = tokens_of(6, first=1000 * number)
                worker.store(str(number), prompt, range(6))
                worker.load(str(number), prompt, range(6, 12))
                assert worker.holds(prompt, range(6, 12)) == [True] * 6
            never = tokens_of(num_blocks + 9)
            worker.transfers.submit(Orders(loads=[Load("long", Scope(), never, 0, list(range(20)))]))
            assert worker.transfers.wait(DEADLINE_S)
            assert worker.transfers.take_finished().failed_blocks >= set(range(20))
            assert worker.rounds.counts.num_lost_sessions == 0, "a refused prompt costs that prompt"

    await on_threads(work)
    assert (await client.stats()).pools[0].num_running_sequences == 0


async def test_a_held_request_is_released_once_when_its_stores_have_ended(cache_server: RunningServer) -> None:
    def work() -> None:
        gates: list[Gate] = []
        worker = Worker(cache_server.address, wrap=gated(gates))
        with closing(worker):
            worker.order_store("a", PROMPT, [3, 9, 4, 7])
            worker.transfers.submit(Orders(held=["a", "b"]))
            assert worker.transfers.take_finished().released == {"b"}, "b has no stores"
            while not gates:
                assert not worker.transfers.wait(0.001)
            assert gates[0].reached.wait(DEADLINE_S)
            assert worker.transfers.take_finished().released == set()
            gates[0].open.set()
            assert worker.transfers.wait(DEADLINE_S)
            assert worker.transfers.take_finished().released == {"a"}
            assert worker.transfers.take_finished().released == set()

    await on_threads(work)


async def test_vllm_waits_for_a_store_that_reads_blocks_which_it_takes_back(cache_server: RunningServer) -> None:
    def work() -> None:
        gates: list[Gate] = []
        worker = Worker(cache_server.address, wrap=gated(gates))
        with closing(worker):
            worker.order_store("a", PROMPT, [3, 9, 4, 7])
            while not gates:
                assert not worker.transfers.wait(0.001)
            gate = gates[0]
            assert gate.reached.wait(DEADLINE_S)
            worker.order_store("queued", tokens_of(2, first=500), [0, 1])

            worker.transfers.cancel_stores(["queued"])  # does not wait for the copy of another

            def take_back() -> None:
                worker.transfers.cancel_stores(["a"])
                seen.append(gate.open.is_set())
                worker.blocks[:] = 0  # what vLLM's next step writes

            seen: list[bool] = []
            copying = AnnouncedLock(worker.rounds.copying)
            worker.rounds.copying = copying  # type: ignore[assignment]
            taking = threading.Thread(target=take_back)
            taking.start()
            assert copying.is_wanted.wait(DEADLINE_S)
            gate.open.set()
            taking.join(DEADLINE_S)
            assert seen == [True]
            assert worker.transfers.wait(DEADLINE_S)
            assert worker.load("b", PROMPT, [1, 2, 5, 6]).failed_blocks == set(), "the copy had begun, and was whole"
            assert worker.holds(PROMPT, [1, 2, 5, 6]) == [True] * 4
            finished = worker.load("c", tokens_of(2, first=500), [10, 11])
            assert finished.failed_blocks == {10, 11}, "a store that was cancelled in the queue was never made"

    await on_threads(work)


async def test_a_store_that_is_cancelled_within_its_round_is_neither_read_nor_committed(
    cache_server: RunningServer, client: AsyncCacheClient
) -> None:
    def work() -> None:
        worker = Worker(cache_server.address)
        with closing(worker):
            link = worker.connect()
            rounds = Rounds(lambda: link, BLOCK_SIZE)
            job = Job(Store("a", Scope(), PROMPT, [3, 9, 4, 7]))
            step = link.session.step

            def cancelling(items: Any) -> Any:
                answer = step(items)
                job.is_cancelled = True
                return answer

            link.session.step = cancelling  # type: ignore[method-assign]
            rounds.run([job])
            assert (job.num_blocks, rounds.counts.num_dropped_stores, rounds.counts.num_lost_sessions) == (0, 1, 0)
            rounds.run([job])
            assert link.session.step_id == 2, "nothing is begun for a store that was cancelled before its round"
            rounds.close()

    await on_threads(work)
    (pool,) = (await client.stats()).pools
    assert (pool.num_steps, pool.num_cached_blocks, pool.num_running_sequences) == (2, 0, 0)


async def test_a_fault_within_a_copy_unmaps_the_memory(cache_server: RunningServer, client: AsyncCacheClient) -> None:
    """Where the fault is met, parts of the memory are viewed."""
    worker = await on_threads(lambda: Worker(cache_server.address, now=lambda: 0.0))
    await on_threads(worker.store, "a", PROMPT, [3, 9, 4, 7])
    (pool,) = cache_server.session_manager.registry.pools
    assert len(pool.mappings) == 1
    finished = await on_threads(worker.load, "b", PROMPT, [1, 2, 5, 10**6])
    assert finished.failed_blocks == {1, 2, 5, 10**6}
    async with asyncio.timeout(DEADLINE_S):
        while pool.mappings:
            await client.stats()
    assert not cache_server.session_manager.sessions
    await on_threads(worker.close)


async def test_a_fault_in_a_copy_loses_the_session_and_not_the_worker(cache_server: RunningServer) -> None:
    def work() -> None:
        gates: list[Gate] = []
        time_s = [0.0]

        def wrap(pages: Any) -> Gate:
            gates.append(Gate(pages))
            gates[-1].open.set()
            return gates[-1]

        worker = Worker(cache_server.address, wrap=wrap, now=lambda: time_s[0])
        with closing(worker):
            worker.store("a", PROMPT, [3, 9, 4, 7])
            gates[0].fault = ZeroDivisionError()
            finished = worker.load("b", PROMPT, [1, 2, 5, 6])
            assert (finished.loaded, finished.failed_blocks) == ({"b"}, {1, 2, 5, 6})
            assert worker.load("c", PROMPT, [1, 2, 5, 6]).failed_blocks == {1, 2, 5, 6}, "the pause is not over"
            time_s[0] = 1.5
            assert worker.load("d", PROMPT, [1, 2, 5, 6]).failed_blocks == set()
            assert (len(gates), worker.rounds.counts.num_lost_sessions) == (2, 1)

    await on_threads(work)


async def test_what_was_loaded_counts_only_if_the_session_lived_until_then(cache_server: RunningServer) -> None:
    """The session ends while the copy runs, so its blocks may have been another's: they are computed."""
    loop = asyncio.get_running_loop()

    def end_sessions() -> None:
        for live in cache_server.session_manager.sessions:
            cache_server.session_manager.close(live.core.id, live.core.epoch, drained=False)

    def work() -> None:
        gates: list[Gate] = []

        worker = Worker(cache_server.address, wrap=gated(gates))
        with closing(worker):
            worker.order_store("a", PROMPT, [3, 9, 4, 7])
            while not gates:
                assert not worker.transfers.wait(0.001)
            gates[0].open.set()
            assert worker.transfers.wait(DEADLINE_S)
            gates[0].open.clear()
            gates[0].reached.clear()
            worker.transfers.submit(Orders(loads=[Load("b", Scope(), PROMPT, 0, [1, 2, 5, 6])]))
            assert gates[0].reached.wait(DEADLINE_S)
            asyncio.run_coroutine_threadsafe(asyncio.to_thread(lambda: None), loop).result(DEADLINE_S)
            loop.call_soon_threadsafe(end_sessions)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(DEADLINE_S)
            gates[0].open.set()
            assert worker.transfers.wait(DEADLINE_S)
            finished = worker.transfers.take_finished()
            assert (finished.loaded, finished.failed_blocks) == ({"b"}, {1, 2, 5, 6})

    await on_threads(work)


async def test_a_session_without_transfers_is_renewed(cache_server: RunningServer) -> None:
    renewed = asyncio.Event()
    renew = cache_server.session_manager.table.renew

    def note(*arguments: Any) -> None:
        renew(*arguments)
        count[0] += 1
        if count[0] >= 3:
            renewed.set()

    count = [0]
    cache_server.session_manager.table.renew = note  # type: ignore[method-assign]
    worker = await on_threads(lambda: Worker(cache_server.address, lease_s=0.5))
    await asyncio.wait_for(renewed.wait(), DEADLINE_S)
    await on_threads(worker.close)
    assert not cache_server.session_manager.sessions, "the end of the worker ends its session"


async def test_a_killed_service_costs_a_miss_and_is_used_again_once_it_is_back() -> None:
    async with fleet(0) as services:
        time_s = [0.0]
        worker = await on_threads(lambda: Worker(services.cache_address, now=lambda: time_s[0]))
        await on_threads(worker.store, "a", PROMPT, [3, 9, 4, 7])
        assert not (await on_threads(worker.load, "b", PROMPT, [1, 2, 5, 6])).failed_blocks
        await services.cache.kill()
        finished = await on_threads(worker.load, "c", PROMPT, [1, 2, 5, 6])
        assert (finished.loaded, finished.failed_blocks) == ({"c"}, {1, 2, 5, 6})
        await on_threads(worker.store, "c", PROMPT, [3, 9, 4, 7])
        assert worker.rounds.counts.num_dropped_stores == 1
        await services.start_cache()
        time_s[0] = 10.0
        await on_threads(worker.store, "d", PROMPT, [3, 9, 4, 7])
        assert not (await on_threads(worker.load, "e", PROMPT, [1, 2, 5, 6])).failed_blocks
        assert worker.rounds.counts.num_lost_sessions == 1
        await on_threads(worker.close)


async def test_a_service_that_stands_still_costs_a_miss_after_its_time() -> None:
    async with fleet(0) as services:
        worker = await on_threads(lambda: Worker(services.cache_address, timeout_s=0.5))
        await on_threads(worker.store, "a", PROMPT, [3, 9, 4, 7])
        await services.cache.stop()
        finished = await on_threads(worker.load, "c", PROMPT, [1, 2, 5, 6])
        assert (finished.loaded, finished.failed_blocks) == ({"c"}, {1, 2, 5, 6})
        services.cache.resume()
        await on_threads(worker.close)
