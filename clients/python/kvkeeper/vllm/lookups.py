"""Look-ups on a thread of their own, so that vLLM's scheduler never waits for the cache service.

Look-ups that are waiting go out together and take one round trip. Where the service is lost, refuses or takes too long, the
answer is 0: the prompt is computed. The service is tried again after pauses that grow. With several ranks each has a pool of
its own, and a prefix counts as far as all of them have it.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import CallOptions
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.vllm.backoff import Backoff
from kvkeeper.vllm.orders import Scope, TokenIds

log = logging.getLogger("vllm.kvkeeper")

_MAX_AGE_S = 1.0  # of an answer that was used before
_LEASE_MS = 60_000


class Matcher(Protocol):
    """Looks prompts up in the pools of all ranks."""

    async def match(self, prompts: Sequence[tuple[TokenIds, Scope]]) -> list[int]:
        """Tokens that all ranks have cached of each (prompt, scope). Raises KvkeeperError."""

    async def renew(self) -> None:
        """Says that this side lives. Raises KvkeeperError."""

    async def close(self) -> None:
        """Ends the sessions."""


@dataclass(slots=True)
class _Lookup:
    """A look-up. num_tokens None: there is no answer yet; at: when it was asked, or when the answer came."""

    at: float
    num_tokens: int | None = None
    is_used: bool = False
    number: int = 0


class Lookups:
    """The look-ups of one scheduler. Calls come from vLLM's thread; the connection lives on another."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Matcher]],
        timeout_s: float,
        backoff: Backoff | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """connect raises KvkeeperError."""
        self._connect = connect
        self._timeout_s = timeout_s
        self._backoff = backoff or Backoff()
        self._now = now
        self._lock = threading.Lock()  # of _asked
        self._asked: dict[str, _Lookup] = {}
        self._prompts: dict[str, tuple[TokenIds, Scope]] = {}  # of all requests that were not forgotten
        self._waiting: list[tuple[str, int]] = []  # of the loop's thread
        self._flushing: asyncio.Task[None] | None = None
        self._matcher: Matcher | None = None
        self._number = 0
        self.num_batches = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvkeeper-lookups", daemon=True)
        self._thread.start()

    def ask(self, request_id: str, token_ids: TokenIds, scope: Scope) -> None:
        """See Lookups of planner.py."""
        with self._lock:
            self._prompts[request_id] = (token_ids, scope)
            self._ask(request_id)

    def answer(self, request_id: str) -> int | None:
        """See Lookups of planner.py. An answer that was used is asked for again once it is old, because blocks come and go."""
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is None:
                return 0
            age_s = self._now() - asked.at
            if asked.num_tokens is None:
                return 0 if age_s > self._timeout_s else None
            if asked.is_used and age_s > _MAX_AGE_S:
                self._ask(request_id)
                return None
            asked.is_used = True
            return asked.num_tokens

    def forget(self, request_id: str) -> None:
        """See Lookups of planner.py."""
        with self._lock:
            self._asked.pop(request_id, None)
            self._prompts.pop(request_id, None)

    def close(self) -> None:
        """Ends the sessions and the thread. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._drop(), self._loop).result(self._timeout_s)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _ask(self, request_id: str) -> None:
        self._number += 1
        self._asked[request_id] = _Lookup(self._now(), number=self._number)
        self._loop.call_soon_threadsafe(self._enqueue, request_id, self._number)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        renewing = self._loop.create_task(self._renew_for_ever())
        self._loop.run_forever()
        renewing.cancel()
        self._loop.run_until_complete(asyncio.gather(renewing, return_exceptions=True))

    def _enqueue(self, request_id: str, number: int) -> None:
        self._waiting.append((request_id, number))
        if self._flushing is None:
            self._flushing = self._loop.create_task(self._flush())

    async def _flush(self) -> None:
        """Looks up what waits, batch by batch: what is asked meanwhile goes with the next one."""
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                with self._lock:
                    prompts = {row: self._prompts[row[0]] for row in batch if row[0] in self._prompts}
                found = await self._match(list(prompts.values())) if prompts else []
                self._note(list(prompts), found)
        finally:
            self._flushing = None

    async def _match(self, prompts: list[tuple[TokenIds, Scope]]) -> list[int]:
        """Tokens that are cached of each; all 0 where the service does not say."""
        nothing = [0] * len(prompts)
        if self._matcher is None and not self._backoff.may_try(self._now()):
            return nothing
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._matcher is None:
                    self._matcher = await self._connect()
                    self._backoff.succeeded()
                self.num_batches += 1
                return await self._matcher.match(prompts)
        except (KvkeeperError, TimeoutError, OSError) as error:
            await self._drop()
            pause_s = self._backoff.failed(self._now())
            log.warning("kvkeeper: look-ups fail (%s); prompts are computed, next try in %.1f s", type(error).__name__, pause_s)
        except Exception:  # a prompt is computed, whatever is wrong here
            await self._drop()
            self._backoff.failed(self._now())
            log.exception("kvkeeper: look-ups fail; prompts are computed")
        return nothing

    def _note(self, rows: list[tuple[str, int]], found: list[int]) -> None:
        with self._lock:
            for (request_id, number), num_tokens in zip(rows, found, strict=True):
                asked = self._asked.get(request_id)
                if asked is not None and asked.number == number:  # else it was asked again since
                    asked.num_tokens, asked.at = num_tokens, self._now()

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_LEASE_MS / 3000)
            if self._matcher is not None and self._flushing is None:
                try:
                    await self._matcher.renew()
                except KvkeeperError:
                    await self._drop()

    async def _drop(self) -> None:
        matcher, self._matcher = self._matcher, None
        if matcher is not None:
            with contextlib.suppress(Exception):
                await matcher.close()


class PoolMatcher:
    """One session for each rank's pool, without a mapping."""

    def __init__(self, client: AsyncCacheClient, sessions: list[AsyncCacheSession]) -> None:
        self._client, self._sessions = client, sessions

    @classmethod
    async def connect(cls, address: str, specs: Sequence[pb.KvSpec], timeout_s: float, client_name: str) -> "PoolMatcher":
        """Raises KvkeeperError."""
        client = AsyncCacheClient(address, CallOptions(timeout_s=timeout_s, retry_s=0))
        made = cls(client, [])
        try:
            for spec in specs:
                made._sessions.append(await client.open_session(spec, ttl_ms=_LEASE_MS, client_name=client_name))
        except BaseException:
            await made.close()
            raise
        return made

    async def match(self, prompts: Sequence[tuple[TokenIds, Scope]]) -> list[int]:
        calls = [
            session.match_prefix(token_ids, **scope._asdict()) for token_ids, scope in prompts for session in self._sessions
        ]
        # What lies below the host tier alone is not there when vLLM's load begins.
        found = [
            answer.num_matched_tokens - answer.num_disk_tokens - answer.num_remote_tokens
            for answer in await asyncio.gather(*calls)
        ]
        num_ranks = len(self._sessions)
        return [min(found[at : at + num_ranks], default=0) for at in range(0, num_ranks * len(prompts), num_ranks)]

    async def renew(self) -> None:
        await asyncio.gather(*(session.renew() for session in self._sessions))

    async def close(self) -> None:
        with contextlib.suppress(KvkeeperError):
            await asyncio.gather(*(session.close() for session in self._sessions), return_exceptions=True)
        await self._client.close()
