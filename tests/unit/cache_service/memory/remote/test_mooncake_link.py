"""Calls with a deadline in another process: late ones keep their memory, and a process that dies is started again."""

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kvkeeper.cache_service.memory.remote import mooncake_link
from kvkeeper.cache_service.memory.remote.mooncake_link import NUM_PARTS, MooncakeLink
from kvkeeper.cache_service.memory.remote.remote_address import Node, RemoteAddress
from kvkeeper.cache_service.memory.remote.remote_store import ServerError

ADDRESS = RemoteAddress((Node("127.0.0.1", 1),), 0, is_tls=False, is_mooncake=True)


def link_of(timeout: float) -> MooncakeLink:
    return MooncakeLink(ADDRESS, 100, memory=0, timeout=timeout, module="tests.support.remote.stand_in_process")


@pytest.fixture
def link() -> Iterator[MooncakeLink]:
    found = link_of(30.0)
    yield found
    found.close()


def lend(link: MooncakeLink) -> int:
    """How many parts can be had at once."""
    with ExitStack() as stack:
        for count in range(NUM_PARTS + 1):
            try:
                stack.enter_context(link.part())
            except ServerError:
                return count
    raise AssertionError("more parts than there are")


def test_a_call_sees_what_lies_in_its_part_and_gives_it_back(link: MooncakeLink) -> None:
    for _ in range(2 * NUM_PARTS):
        with link.part() as part:
            part.memory[:4] = b"here"
            assert part.ask(call="echo") == "here"
    assert lend(link) == NUM_PARTS


def test_a_part_is_lent_again_only_after_a_late_answer(link: MooncakeLink) -> None:
    assert link.ask(call="echo")
    link._timeout = 0.01
    with pytest.raises(ServerError), link.part() as part:
        part.ask(call="late")
    link._timeout = 30.0
    assert lend(link) == NUM_PARTS - 1
    assert link.ask(call="now")  # its answer comes behind the late one
    assert lend(link) == NUM_PARTS


def test_a_process_that_dies_is_no_answer_and_is_started_again(link: MooncakeLink) -> None:
    before = link.ask(call="echo")
    with pytest.raises(ServerError), link.part() as part:
        part.ask(call="die")
    while True:  # until its end is noticed, calls have no answer
        try:
            after = link.ask(call="echo")
            break
        except ServerError:
            continue
    assert after != before
    assert lend(link) == NUM_PARTS


def test_after_the_end_nothing_is_asked(link: MooncakeLink) -> None:
    link.ask(call="echo")
    link.close()
    with pytest.raises(ServerError):
        link.ask(call="echo")


@pytest.mark.parametrize("call", ["memfd_create", "socketpair", "dup", "Popen"])
def test_a_process_that_cannot_be_started_is_no_answer_and_leaves_no_descriptor(
    link: MooncakeLink, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    owner = {"socketpair": mooncake_link.socket, "Popen": subprocess}.get(call, os)
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, refuse)
        with pytest.raises(ServerError):
            link.ask(call="echo")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert link.ask(call="echo"), "it is started once that can be"


def test_a_process_that_reads_nothing_holds_up_no_call_and_is_replaced() -> None:
    link = link_of(0.2)
    with ThreadPoolExecutor(3) as threads:
        with link._lock:
            child = link._started()
        os.kill(child.process.pid, signal.SIGSTOP)
        calls = [threads.submit(link.ask, call="echo", names=["x" * (1 << 21)]) for _ in range(3)]
        try:
            for call in calls:
                with pytest.raises(ServerError):
                    call.result(10)
        finally:
            was_killed = child.process.poll() is not None or child.is_gone
            child.process.kill()
    assert was_killed
    link._timeout = 30.0
    while link._child is child:  # until its end is noticed
        child.process.wait()
    assert link.ask(call="echo") != str(child.process.pid)
    assert lend(link) == NUM_PARTS
    link.close()
