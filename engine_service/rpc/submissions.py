"""Submissions: requests that outlive their client's connection, and their results, kept for a bounded time.

Rules: the same id with the same contents is the same request, however often and however close together it comes; the same id
with other contents is refused while the first is remembered. A request that ended is forgotten after `keep_s` seconds; the ones
that ended first go earlier, when more than `max_kept` have ended or their results take more than `max_bytes`. Knows no wire;
the function that admits a request is handed in.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from ..outputs.generation import Generation
from ..values.errors import DuplicateRequest, EngineError, RequestMoved, UnknownRequest
from ..values.output_chunk import OutputChunk
from .submission import Submission

Admit = Callable[[Callable[[OutputChunk | EngineError], None]], Awaitable[Generation]]


class Submissions:
    """Submitted requests by id, open and ended, within bounds of number, age and bytes."""

    def __init__(self, max_kept: int, keep_s: float, max_bytes: int) -> None:
        self._max_kept, self._max_bytes = max_kept, max_bytes
        self._keep_s = keep_s
        self._by_id: dict[str, Submission] = {}  # in order of submission
        self._ended: dict[str, Submission] = {}  # of them, in order of their ends
        self._num_ended_bytes = 0

    async def submit(self, request_id: str, digest: bytes, admit: Admit) -> None:
        """Admit the request once. Raises DuplicateRequest, or the error of admit, which leaves nothing behind."""
        self._forget_old()
        known = self._by_id.get(request_id)
        if known is None:
            await self._admit(request_id, digest, admit)
            return
        if known.digest != digest:
            raise DuplicateRequest("a request with this id was submitted with other contents")
        await asyncio.shield(known.admitted)

    async def adopt(self, request_id: str, digest: bytes, admit: Admit) -> Submission:
        """Admit a request of another engine; digest: empty where it was not submitted there. Raises as submit does."""
        self._forget_old()
        if request_id in self._by_id:
            raise DuplicateRequest("a request with this id is known here")
        return await self._admit(request_id, digest, admit)

    def drop(self, request_id: str) -> None:
        """End a request and forget it: it goes on in another engine."""
        if (submission := self._by_id.get(request_id)) is not None:
            self._forget(request_id)
            if submission.generation is not None:
                submission.generation.cancel()

    def get_digest(self, request_id: str) -> bytes:
        """The digest of the submission of a request; empty for a request that was not submitted."""
        submission = self._by_id.get(request_id)
        return b"" if submission is None else submission.digest

    async def _admit(self, request_id: str, digest: bytes, admit: Admit) -> Submission:
        admitted = asyncio.get_running_loop().create_future()
        submission = self._by_id[request_id] = Submission(digest, admitted, on_end=partial(self._note_end, request_id))
        try:
            submission.generation = await admit(submission.add_output)
        except BaseException as error:
            if self._by_id.get(request_id) is submission:
                self._forget(request_id)
            submission.admitted.set_exception(
                error if isinstance(error, EngineError) else UnknownRequest("the request was not admitted")
            )
            submission.admitted.exception()  # calls that wait for it get it; that none waits is no fault
            raise
        submission.admitted.set_result(None)
        return submission

    async def wait(self, request_id: str, seconds: float) -> tuple[Generation, Submission]:
        """The submission when it has ended, or after so many seconds. Raises UnknownRequest, RequestMoved."""
        submission = self._find(request_id)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(submission.admitted)
                await submission.ended.wait()
        except TimeoutError:
            pass
        if submission.generation is None:
            raise UnknownRequest("the request is being admitted")
        if submission.ended.is_set():
            submission.fetched.set()
        if isinstance(submission.error, RequestMoved):
            raise submission.error
        return submission.generation, submission

    async def admitted(self, request_id: str) -> Submission:
        """The submission, once it is admitted. Raises UnknownRequest, or the error of admit."""
        submission = self._find(request_id)
        await asyncio.shield(submission.admitted)
        return submission

    def _find(self, request_id: str) -> Submission:
        self._forget_old()
        submission = self._by_id.get(request_id)
        if submission is None:
            raise UnknownRequest("no request with this id was submitted, or its results are no longer kept")
        return submission

    async def wait_fetched(self) -> None:
        """Wait until all requests submitted so far have ended, and their results are fetched, forgotten or not wanted."""
        for submission in list(self._by_id.values()):
            await submission.fetched.wait()

    @property
    def num_kept(self) -> int:
        """Submitted requests that are known, ended or not."""
        return len(self._by_id)

    def _note_end(self, request_id: str, submission: Submission) -> None:
        if self._by_id.get(request_id) is submission and request_id not in self._ended:
            self._ended[request_id] = submission
            self._num_ended_bytes += submission.num_bytes

    def _forget_old(self) -> None:
        now = time.monotonic()
        while self._ended:
            request_id, first = next(iter(self._ended.items()))
            is_surplus = self._num_ended_bytes > self._max_bytes and len(self._ended) > 1  # the last one is kept in any case
            if not is_surplus and len(self._ended) <= self._max_kept and now - first.ended_at < self._keep_s:
                return
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        submission = self._by_id.pop(request_id)
        if self._ended.pop(request_id, None) is not None:
            self._num_ended_bytes -= submission.num_bytes
        submission.fetched.set()
