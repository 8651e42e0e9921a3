"""The real gateway over three nodes, each a cache service and an engine: it sends each prompt where its prefix is cached.

It knows from our events what is cached where. A node that is lost takes no request with it that had not begun.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import openai

from kvkeeper.client import AsyncEngineClient, CallOptions, GenerateOptions, Sampling
from tests.support.processes.fleet import DEADLINE_S
from tests.support.processes.nodes import BLOCK_SIZE, Node, Nodes, nodes, until

NUM_NODES, NUM_PREFIXES, NUM_ROUNDS = 3, 8, 4
NUM_NEW = 4
# Without these the gateway sends one of eight hits elsewhere on purpose, to a node that has less in its cache than the others.
ROUTING = ("--policy", "cache_aware", "--worker-warmup-divert-every", "0")


def prefix(number: int) -> str:
    return "".join(f"def part_{number}_{row}(x):\n    return x + {row}\n" for row in range(12))


def prompt(number: int, question: int) -> str:
    return f"{prefix(number)}\ndef question_{question}(x):\n"


@asynccontextmanager
async def client_of(world: Nodes) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=world.base_url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, world: Nodes, text: str) -> tuple[str, int]:
    """The text that goes on behind it, and how many tokens of it were cached."""
    found = await client.completions.create(model=world.model, prompt=text, max_tokens=NUM_NEW, temperature=0)
    assert found.usage is not None
    details = found.usage.prompt_tokens_details
    return found.choices[0].text, 0 if details is None else details.cached_tokens or 0


async def place_of(world: Nodes, call: Callable[[], Awaitable[object]]) -> int:
    """Which node served the one request of this call."""
    before = [await node.num_completed() for node in world.nodes]
    await call()
    grown = [await node.num_completed() - count for node, count in zip(world.nodes, before, strict=True)]
    assert sum(grown) == 1
    return grown.index(1)


async def until_known(world: Nodes) -> None:
    """Until the gateway knows of each block that the nodes have."""

    async def is_known() -> bool:
        counts = [await node.num_blocks_known() for node in world.nodes]
        return min(counts) >= 0 and sum(counts) == await world.metric(INDEXED)

    await until(is_known, expected=True)


INDEXED = "smg_kv_index_blocks"


async def test_prefixes_stay_on_their_node() -> None:
    async with nodes(NUM_NODES, *ROUTING) as world, client_of(world) as client:
        homes: dict[int, int] = {}
        for question, number in itertools.product(range(NUM_ROUNDS), range(NUM_PREFIXES)):
            await until_known(world)
            cached = 0

            async def once(number: int = number, question: int = question) -> None:
                nonlocal cached
                _, cached = await ask(client, world, prompt(number, question))

            home = await place_of(world, once)
            assert homes.setdefault(number, home) == home, f"round {question}"
            assert (cached >= 8 * BLOCK_SIZE) == (question > 0)
        assert len(set(homes.values())) > 1, "one node had them all"
        assert await world.metric("smg_kv_event_gaps_total") == 0


async def test_what_another_way_brought_to_a_node_is_found_there_by_its_events() -> None:
    """The gateway has never seen these prompts, so it cannot go by what it has sent."""
    async with nodes(NUM_NODES, *ROUTING) as world, client_of(world) as client:
        for number in range(NUM_PREFIXES):
            await ask_directly(world.nodes[number % NUM_NODES], prefix(number))
        await until_known(world)
        for number in range(NUM_PREFIXES):
            assert await place_of(world, lambda number=number: ask(client, world, prompt(number, 1))) == number % NUM_NODES


async def test_what_a_restarted_cache_service_has_lost_is_forgotten_by_the_gateway() -> None:
    async with nodes(2, *ROUTING) as world, client_of(world) as client:
        one, other = world.nodes
        for node, number in ((one, 0), (other, 1)):
            await ask_directly(node, prefix(number))
        await until_known(world)
        before = await world.metric(INDEXED)
        await one.restart_cache()
        await until_known(world)
        assert 0 < await world.metric(INDEXED) < before
        await ask_directly(other, prefix(0))
        await until_known(world)
        assert await place_of(world, lambda: ask(client, world, prompt(0, 1))) == 1


async def ask_directly(node: Node, text: str) -> None:
    async with AsyncEngineClient(node.address, CallOptions(retry_s=0)) as client:
        options = GenerateOptions(sampling=Sampling(max_tokens=1, temperature=0))
        async for _ in client.generate(text, options):
            pass


async def test_a_killed_node_takes_no_request_with_it_that_had_not_begun_and_comes_back() -> None:
    async with nodes(NUM_NODES, *ROUTING) as world, client_of(world) as client:
        expected = {number: (await ask(client, world, prompt(number, 0)))[0] for number in range(NUM_PREFIXES)}
        await until_known(world)
        home = await place_of(world, lambda: ask(client, world, prompt(0, 0)))
        lost = world.nodes[home]
        crowd = Crowd(client, world, expected)
        asking = [asyncio.create_task(crowd.keep_asking(number)) for number in range(NUM_PREFIXES)]
        await crowd.until_all_ask()
        await lost.kill()
        for _ in range(3):  # right after it, and while the gateway learns of it
            again = await asyncio.gather(*(ask(client, world, prompt(number, 0)) for number in range(NUM_PREFIXES)))
            assert [text for text, _ in again] == list(expected.values())
        for task in asking:
            task.cancel()
        ended = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
        await lost.start()
        await until(world.num_healthy, NUM_NODES)
        assert await lost.num_completed() == 0
        for number in itertools.count(NUM_PREFIXES):
            await ask(client, world, prompt(number, 0))
            if await lost.num_completed():
                break
        await until_known(world)
        _, cached = await ask(client, world, prompt(number, 1))
        assert cached >= 8 * BLOCK_SIZE
        assert await lost.num_cached_tokens() == cached
        assert await world.metric("smg_kv_event_gaps_total") == 0


@dataclass
class Crowd:
    """Clients that ask without a pause. A request on the lost node may end in an error; its text had begun then."""

    client: openai.AsyncOpenAI
    world: Nodes
    expected: dict[int, str]
    answered: set[int] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_all_ask(self) -> None:
        """Until each has had an answer, and so is on its way to the next."""
        async with asyncio.timeout(DEADLINE_S):
            while self.answered != set(self.expected):
                self.news.clear()
                await self.news.wait()

    async def keep_asking(self, number: int) -> None:
        while True:
            text, error = "", None
            try:
                stream = await self.client.completions.create(
                    model=self.world.model, prompt=prompt(number, 0), max_tokens=NUM_NEW, temperature=0, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].text if chunk.choices else ""
            except openai.APIError as failure:
                error = failure
            if error is not None and not text:
                raise AssertionError("a request that had not begun has failed") from error
            assert self.expected[number] == text or error is not None
            self.answered.add(number)
            self.news.set()
