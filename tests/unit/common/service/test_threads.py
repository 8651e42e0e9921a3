"""What becomes of work where the host gives no thread: it is refused and never done later, or done here."""

import asyncio
import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
import structlog

from kvkeeper.cache_service.core.values.errors import HostExhausted
from kvkeeper.cache_service.rpc.methods import CONTRACT
from kvkeeper.common.service.process import run
from kvkeeper.common.service.threads import NoThread, find_shortage, in_thread, in_thread_or_here, start_thread
from tests.support.stand_ins.no_threads import no_threads


async def test_work_is_done_in_a_thread_with_its_result_or_its_error() -> None:
    names = [await in_thread(lambda: threading.current_thread().name) for _ in range(2)]
    assert threading.current_thread().name not in names

    def fail(text: str) -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="its own"):
        await in_thread(fail, "its own")


async def test_what_was_refused_is_not_done_once_there_is_a_thread_again() -> None:
    done: list[str] = []
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    with no_threads() as refused:
        with pytest.raises(NoThread, match="the host gives the service no more threads now"):
            await in_thread(done.append, "refused")
        assert refused
        await in_thread_or_here(done.append, "here")
    await in_thread(done.append, "later")
    assert done == ["here", "later"]


async def test_a_thread_that_there_is_goes_on() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    await in_thread(lambda: None)
    with no_threads() as refused:
        assert await in_thread(lambda: 7) == 7
    assert not refused


def test_a_thread_that_cannot_be_started_is_told_as_such() -> None:
    thread = threading.Thread(target=lambda: None)
    with no_threads(), pytest.raises(NoThread):
        start_thread(thread)
    start_thread(thread)
    thread.join()
    with pytest.raises(RuntimeError, match="only be started once"):
        start_thread(thread)


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (RuntimeError("can't start new thread"), "threads"),
        (NoThread("no more"), "threads"),
        (MemoryError(), None),
        (OSError(errno.ENOMEM, "x"), "memory"),
        (OSError(errno.EMFILE, "x"), "descriptors"),
        (OSError(errno.ENFILE, "x"), "descriptors"),
        (RuntimeError("another"), None),
        (OSError(errno.EIO, "x"), None),
        (ValueError("x"), None),
        (None, None),
    ],
)
def test_a_shortage_is_told_from_a_bug(error: BaseException | None, resource: str | None) -> None:
    found = find_shortage(error)
    assert (found.resource if found is not None else None) == resource


def test_a_call_that_meets_a_shortage_is_told_to_come_again_and_a_bug_is_not() -> None:
    def told(error: Exception) -> tuple[str, dict[str, str], str]:
        with structlog.testing.capture_logs() as logs:
            try:
                raise error
            except Exception:
                refusal = CONTRACT.hide_bug("Method")
        return refusal.reason, refusal.metadata, logs[0]["event"]  # type: ignore[attr-defined]

    assert told(OSError(errno.EMFILE, "x")) == ("HOST_EXHAUSTED", {"resource": "descriptors"}, "host_exhausted")
    assert told(KeyError("x")) == ("BROKEN_INVARIANT", {}, "broken_invariant")
    status = CONTRACT.refusals.to_status(HostExhausted("x", resource="threads"))
    assert (status.code, len(status.details)) == (grpc.StatusCode.UNAVAILABLE.value[0], 2), "with RetryInfo"


@pytest.mark.parametrize("error", [NoThread("x"), RuntimeError("can't start new thread"), OSError(errno.EMFILE, "x")])
def test_a_start_that_meets_a_shortage_is_one_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(config: object) -> None:
        raise error

    config = SimpleNamespace(log_level="info", trace_endpoint="")
    try:
        code = run("kvkeeper cache", lambda argv, environ: config, serve, [], lambda config: None)
    finally:
        structlog.reset_defaults()  # the log went to a stream that ends with this test
    said = capsys.readouterr().err
    assert (code, said) == (1, f"kvkeeper cache: {find_shortage(error).text}\n")  # type: ignore[union-attr]
