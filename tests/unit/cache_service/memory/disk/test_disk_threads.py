"""Work for a disk waits where the host has no thread left, is done once there is one, and the end comes all the same."""

import threading

from kvkeeper.cache_service.memory.disk.disk_threads import NUM_THREADS, DiskThreads
from tests.support.stand_ins.no_threads import no_threads


def test_work_waits_for_a_thread_and_is_done_in_its_order() -> None:
    threads, done, is_done, ended = DiskThreads(), list[int](), threading.Event(), list[str]()
    with no_threads() as refused:
        for number in range(3):
            threads.do(lambda number=number: done.append(number))  # type: ignore[misc]
        assert (done, len(refused)) == ([], 3)
    threads.do(is_done.set)
    assert is_done.wait(10)
    assert threads.close(10, lambda: ended.append("end"))
    assert (sorted(done), ended) == ([0, 1, 2], ["end"])


def test_a_few_threads_do_what_all_would_until_the_others_come() -> None:
    threads, ended = DiskThreads(), list[str]()
    at_work, may_end = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        at_work.release()
        assert may_end.wait(10)

    threads.do(wait)
    assert at_work.acquire(timeout=10)
    for _ in range(NUM_THREADS - 1):
        threads.do(wait)
    threads.fill()
    assert all(at_work.acquire(timeout=10) for _ in range(NUM_THREADS - 1)), "each has a thread of its own"
    may_end.set()
    assert threads.close(10, lambda: ended.append("end"))
    assert ended == ["end"]


def test_the_end_without_any_thread_is_told_here() -> None:
    threads, done, ended = DiskThreads(), list[str](), list[str]()
    with no_threads():
        threads.do(lambda: done.append("work"))
        assert threads.close(10, lambda: ended.append("end"))
    assert (done, ended) == ([], ["end"])
