"""Calls with a deadline in another process: late ones keep their memory, and a process that dies is started again."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvkeeper.cache_service.memory.remote.mooncake_link import NUM_PARTS, MooncakeLink
from kvkeeper.cache_service.memory.remote.remote_address import Node, RemoteAddress
from kvkeeper.cache_service.memory.remote.remote_server import ServerError

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
