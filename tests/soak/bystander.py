"""A client of the cache service beside its engines: all that looks or evicts, and one-item calls in a session of its own.

What it writes is a function of the prefix, so that a hit must show what an earlier sequence of it wrote, also over a restart
with kept memory, and never an engine's bytes. Rule: a call may be refused whenever a service dies or forgets the session; then
it begins anew. What a call answers must be right.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import numpy as np

from kvkeeper.client import AsyncCacheClient, AsyncCacheSession, CallOptions, KvkeeperError, KvTokens
from kvkeeper.engine_service.cache_session.kv_spec import make_kv_spec
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from tests.support.processes.fleet import BLOCK_SIZE, DEADLINE_S

TENANT = "bystander"
_PAUSE_S = 0.05
_LEASE_MS = 2000
_MOST_TOKENS = 5 * BLOCK_SIZE
_STEMS = 4


class Bystander:
    """One client, until is_over is set."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.num_calls = 0
        self.is_over = False
        self._address, self._rng = address, rng
        self._spec = make_kv_spec(load_served_model(EngineConfig(model=HASH_TOY)), BLOCK_SIZE)
        self._num_sequences = 0

    async def run(self) -> None:
        while not self.is_over:
            with contextlib.suppress(KvkeeperError):
                async with AsyncCacheClient(self._address, CallOptions(timeout_s=DEADLINE_S, retry_s=0)) as client:
                    async with await client.open_session(self._spec, ttl_ms=_LEASE_MS, client_name=TENANT) as session:
                        await self._use(client, session)
            await asyncio.sleep(_PAUSE_S)  # as a client that was refused

    async def _use(self, client: AsyncCacheClient, session: AsyncCacheSession) -> None:
        watching = asyncio.ensure_future(self._watch(session))
        acts: list[Callable[[], Awaitable[object]]] = [
            client.capabilities,
            client.stats,
            client.list_sequences,
            session.renew,
            session.collect_garbage,
            lambda: self._audit(client),
            lambda: session.evict_blocks(num_blocks=2),
            lambda: session.match_prefix(self._tokens(), TENANT),
            lambda: session.explain_match(self._tokens(), TENANT),
            lambda: session.check_admission(self._tokens(), tenant=TENANT),
            lambda: self._pin(session),
            *[lambda: self._sequence(session)] * 6,
        ]
        try:
            while not self.is_over:
                await self._rng.choice(acts)()
                self.num_calls += 1
                await asyncio.sleep(0)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _sequence(self, session: AsyncCacheSession) -> None:
        """One from its start to its release, perhaps with a fork, a way to the host tier and back, or a cut."""
        self._num_sequences += 2
        number, tokens = self._num_sequences, self._tokens()
        await session.create_sequence(number, tokens, tenant=TENANT)
        try:
            found = await session.extend(number, len(tokens))
            cached = found.num_committed_tokens
            await session.write_kv(number, cached, self._contents(tokens, cached))
            await session.commit(number, len(tokens))
            if self._rng.random() < 0.3:
                await session.fork(number, number + 1)
                await self._check(session, number + 1, tokens)
                await session.release(number + 1)
            if self._rng.random() < 0.3:
                with contextlib.suppress(KvkeeperError):  # no host tier, or no room in it
                    await session.swap_out(number)
                    await session.swap_in(number)
            if self._rng.random() < 0.3:
                tokens = tokens[:-1]
                await session.truncate(number, len(tokens))
            await self._check(session, number, tokens)
        except KvkeeperError as error:
            if error.reason in ("OUT_OF_BLOCKS", "NO_ROOM"):
                await session.release(number)
                return
            raise
        await session.release(number)

    async def _check(self, session: AsyncCacheSession, number: int, tokens: list[int]) -> None:
        read, expected = await session.read_kv(number), self._contents(tokens, 0)
        for name in ("keys", "values"):
            same = np.array_equal(getattr(read, name), getattr(expected, name))
            assert same, f"{name} of {tokens} are not those that were written"

    async def _pin(self, session: AsyncCacheSession) -> None:
        with contextlib.suppress(KvkeeperError):  # nothing of it is cached
            pinned = await session.pin_prefix(self._tokens(), ttl_ms=100, tenant=TENANT)
            await session.unpin_prefix(pinned.pin_id)

    async def _audit(self, client: AsyncCacheClient) -> None:
        assert list((await client.check_invariants()).violations) == []

    async def _watch(self, session: AsyncCacheSession) -> None:
        with contextlib.suppress(KvkeeperError):
            async for _ in session.watch_events(TENANT, timeout_s=DEADLINE_S):
                pass

    def _tokens(self) -> list[int]:
        stem = self._rng.randrange(_STEMS)
        return [(place * place + stem * place) % 512 for place in range(self._rng.randint(2, _MOST_TOKENS))]

    def _contents(self, tokens: list[int], first: int) -> KvTokens:
        """Of the tokens from first on."""
        spec = self._spec
        prefixes = np.cumsum(np.array(tokens) + 1)[first:]
        shape = (spec.num_layers, len(prefixes), spec.num_kv_heads, spec.head_dim)
        words = np.arange(spec.num_layers * spec.num_kv_heads * spec.head_dim)
        words = words.reshape(spec.num_layers, 1, spec.num_kv_heads, spec.head_dim)
        keys = np.broadcast_to((prefixes[None, :, None, None] * 7 + words) % 1000, shape).astype(np.float16)  # the toy's
        return KvTokens(keys, -keys)
