"""Rounds of loads and stores on the cache service: two steps with copies between them, for as many as a step may have.

Owns the session that maps the memory, and its end: a failure of any kind drops it, and it is opened again after a pause. The
first step finds and holds what is loaded and reserves what is stored; the second commits and releases. What was loaded counts
only once the answer to the second step has come: until then nothing says that the session lived, and that the blocks were still
what they were.
"""

import contextlib
import itertools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import numpy as np
import numpy.typing as npt

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.arena import Arena
from kvkeeper.client.cache_sync import CacheClient
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import CallOptions
from kvkeeper.client.session_sync import CacheSession
from kvkeeper.client.steps import StepItems
from kvkeeper.vllm.backoff import Backoff
from kvkeeper.vllm.orders import Load, Store
from kvkeeper.vllm.pages import Pages

log = logging.getLogger("vllm.kvkeeper")

_AWAY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
# Refusals of one prompt, which say nothing of the session.
_REFUSED = {"NEVER_FITS", "OUT_OF_SEQUENCES", "INVALID_FIELD"}


class Job:
    """A load or a store under way. ready: returns once the device work before it is done; raises what it likes."""

    def __init__(self, order: Load | Store, ready: Callable[[], None] | None = None) -> None:
        self.order = order
        self.ready = ready
        self.is_cancelled = False  # then no copy of it begins; whether one runs, see Rounds.copying
        self.num_blocks = 0  # blocks that were moved
        self.has_failed = False  # for a load: the blocks behind num_blocks were not loaded


class Link:
    """A session that maps the memory of its pool."""

    def __init__(self, client: CacheClient, session: CacheSession, arena: Arena, pages: Pages) -> None:
        self.session = session
        self._client, self._arena = client, arena
        self.pages = pages

    @classmethod
    def connect(
        cls, address: str, spec: pb.KvSpec, make_pages: Callable[[Arena], Pages], *, lease_s: float, timeout_s: float, name: str
    ) -> "Link":
        """Raises KvkeeperError, and ValueError for a pool that cannot be copied to."""
        client = CacheClient(address, CallOptions(timeout_s=timeout_s, retry_s=0))  # a prompt is computed sooner
        with contextlib.ExitStack() as undo:
            undo.callback(client.close)
            session = client.open_session(spec, pb.EXECUTOR_CACHE, ttl_ms=round(lease_s * 1000), client_name=name)
            undo.callback(_quietly, session.close)
            if session.pool.block_bytes != spec.page.page_bytes:
                raise KvkeeperError(grpc.StatusCode.INTERNAL, message="the pool has another page size than it was asked for")
            arena = session.attach()
            undo.callback(_quietly, arena.close)
            link = cls(client, session, arena, make_pages(arena))
            undo.pop_all()
        return link

    def close(self, *, is_away: bool = False) -> None:
        """Unmaps, then ends the session. is_away: the service does not answer; the end of the mapping says enough."""
        self.pages.close()
        drained = True
        try:
            self._arena.close()
        except BufferError:
            drained = False  # something still views it: the service waits for the end of this process
        self.session.disconnect()
        if not is_away:
            with contextlib.suppress(KvkeeperError):
                self.session.close(drained=drained)
        self._client.close()


class Opener(Protocol):
    """Opens a link. Raises KvkeeperError, OSError, ValueError."""

    def __call__(self) -> Link: ...


@dataclass(slots=True)
class Counts:
    """What the rounds did, over the connector's life."""

    num_rounds: int = 0
    num_loaded_blocks: int = 0
    num_failed_blocks: int = 0  # that were to be loaded, and are computed
    num_stored_blocks: int = 0
    num_dropped_stores: int = 0
    num_lost_sessions: int = 0


class Rounds:
    """The rounds of one worker. For one thread, but for `copying`."""

    def __init__(
        self,
        open_link: Opener,
        block_size: int,
        backoff: Backoff | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self.copying = threading.Lock()  # held while blocks of vLLM's are read; then what is cancelled is never read
        self._open_link = open_link
        self._block_size = block_size
        self._backoff = backoff or Backoff()
        self._now = now
        self._link: Link | None = None
        self._ids = itertools.count(1)

    def run(self, jobs: Sequence[Job]) -> None:
        """Moves what can be moved, and notes in each job what was. Raises nothing: what fails is not moved."""
        self.counts.num_rounds += 1
        for job in jobs:
            job.has_failed = True
        at = 0
        try:
            link = self._require_link()
            if link is not None:
                most = link.session.pool.max_step_items
                for at in range(0, len(jobs), most):
                    self._run(link, jobs[at : at + most])
        except Exception as error:
            for job in jobs[at:]:  # those before were moved
                job.num_blocks, job.has_failed = 0, True
            self._lose(error)
        for job in jobs:
            self._count(job)

    def keep_alive(self) -> None:
        """Renews the lease."""
        if self._link is not None:
            try:
                self._link.session.renew()
            except Exception as error:
                self._lose(error)

    def connect(self) -> bool:
        """Opens the session now, if it is not open. Whether it is open."""
        try:
            return self._require_link() is not None
        except Exception as error:
            self._lose(error)
            return False

    def close(self, *, is_away: bool = False) -> None:
        """Ends the session. Idempotent."""
        link, self._link = self._link, None
        if link is not None:
            link.close(is_away=is_away)

    def _require_link(self) -> Link | None:
        """None during a pause. Raises what the opener raises."""
        if self._link is None and self._backoff.may_try(self._now()):
            self._link = self._open_link()
            self._ids = itertools.count(1)
            self._backoff.succeeded()
        return self._link

    def _lose(self, error: Exception) -> None:
        was_open = self._link is not None
        self.counts.num_lost_sessions += was_open
        pause_s = self._backoff.failed(self._now())
        reason = error.reason or error.code.name if isinstance(error, KvkeeperError) else type(error).__name__
        is_expected = isinstance(error, KvkeeperError | OSError)
        log.warning(
            "kvkeeper: the cache service is %s (%s); vLLM computes, next try in %.1f s",
            "lost" if was_open else "away", reason, pause_s, exc_info=None if is_expected else error,
        )  # fmt: skip
        traceback.clear_frames(error.__traceback__)  # a frame of a copy views the memory
        with contextlib.suppress(Exception):
            self.close(is_away=isinstance(error, KvkeeperError) and error.code in _AWAY)

    def _run(self, link: Link, jobs: Sequence[Job]) -> None:
        session = link.session
        wanted = [job for job in jobs if not job.is_cancelled]
        started = [(job, sequence_id) for job in wanted if (sequence_id := self._create(session, job)) is not None]
        if not started:
            return
        tables = self._start(session, started)
        committed: list[tuple[int, int]] = []  # sequence id, tokens
        with self.copying:
            for job, sequence_id in started:
                found = tables.get(sequence_id)
                if found is None or job.is_cancelled:
                    continue
                num_tokens = self._copy(link.pages, job, *found)
                if num_tokens:
                    committed.append((sequence_id, num_tokens))
        self._end(session, [sequence_id for _, sequence_id in started], committed)

    def _create(self, session: CacheSession, job: Job) -> int | None:
        """The id of a sequence for the job; None where its prompt is refused."""
        sequence_id, tokens = next(self._ids), job.order.token_ids
        if isinstance(job.order, Load):
            tokens = np.append(tokens, np.int32(0))  # a hit leaves a token to compute, and all of these are wanted
        try:
            session.create_sequence(sequence_id, tokens, **job.order.scope._asdict())
        except KvkeeperError as error:
            if error.reason in _REFUSED:
                return None
            raise
        return sequence_id

    def _start(
        self, session: CacheSession, started: Sequence[tuple[Job, int]]
    ) -> dict[int, tuple[int, int, npt.NDArray[np.int32]]]:
        """Sequence id to blocks that were hit, blocks in all, and the table; without those that there is no room for."""
        lens = [len(job.order.token_ids) for job, _ in started]
        answer = session.step(
            StepItems(
                start_ids=np.array([sequence_id for _, sequence_id in started], np.int64),
                # A load needs no slot, but a start takes one or more.
                start_max_new=np.array(
                    [1 if isinstance(job.order, Load) else size for (job, _), size in zip(started, lens, strict=True)], np.int32
                ),
                start_max_hit=np.array(lens, np.int32),
            )
        )
        tables, at = {}, 0
        for row, (_, sequence_id) in enumerate(started):
            if answer.start_results[row] != pb.START_RESULT_STARTED:
                continue
            end = at + int(answer.start_num_blocks[row])
            num_hit = int(answer.start_hits[row]) // self._block_size
            num_reserved = int(answer.start_reserved[row]) // self._block_size
            tables[sequence_id] = (num_hit, num_reserved, answer.start_block_ids[at:end])
            at = end
        return tables

    def _copy(self, pages: Pages, job: Job, num_hit: int, num_reserved: int, table: npt.NDArray[np.int32]) -> int:
        """Copies one job's blocks. Tokens to commit, 0 for a load."""
        if job.ready is not None:
            job.ready()
        order = job.order
        if isinstance(order, Load):
            num_blocks = max(0, min(num_hit, order.first_block + len(order.block_ids)) - order.first_block)
            end = order.first_block + num_blocks
            pages.load(table[order.first_block : end].tolist(), order.block_ids[:num_blocks])
            job.num_blocks, job.has_failed = num_blocks, num_blocks < len(order.block_ids)
            return 0
        end = min(num_reserved, len(order.block_ids))
        pages.store(order.block_ids[num_hit:end], table[num_hit:end].tolist())
        job.num_blocks, job.has_failed = max(0, end - num_hit), end < len(order.block_ids)
        return end * self._block_size if end > num_hit else 0

    def _end(self, session: CacheSession, sequence_ids: Sequence[int], committed: Sequence[tuple[int, int]]) -> None:
        session.step(
            StepItems(
                commit_ids=np.array([sequence_id for sequence_id, _ in committed], np.int64),
                commit_lens=np.array([num_tokens for _, num_tokens in committed], np.int32),
                commit_num_new=np.zeros(len(committed), np.int32),
                release_ids=np.array(sequence_ids, np.int64),
            )
        )

    def _count(self, job: Job) -> None:
        if isinstance(job.order, Load):
            self.counts.num_loaded_blocks += job.num_blocks
            self.counts.num_failed_blocks += len(job.order.block_ids) - job.num_blocks
        else:
            self.counts.num_stored_blocks += job.num_blocks
            self.counts.num_dropped_stores += job.has_failed


def _quietly(close: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        close()
