"""A reader that applies the snapshot and the events of a watch has the contents of the index at all times."""

import pytest

from kvkeeper.cache_service.core.index.events import watch as events
from kvkeeper.cache_service.core.index.events.event_feed import EventFeed
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.types import EventKind, MatchEnd, PressureLevel
from tests.support.worlds.core_pool import A, CorePool, int32
from tests.support.worlds.event_reader import SPEC_KEY, EventReader, block_name, first_parent, names_in


def test_the_changes_of_steps_are_told_in_order() -> None:
    world = CorePool(num_blocks=5, block_size=2)
    world.prefill(1, [1, 2, 3, 4])
    feed = EventFeed(world.manager.state.index, SPEC_KEY, PressureLevel.LOW, lambda: None)
    reader = EventReader("", feed.open(""))
    while feed.advance(1):
        pass
    reader.read()
    first = block_name(first_parent(""), [1, 2])
    second = block_name(first, [3, 4])
    assert reader.kinds == [EventKind.SNAPSHOT, EventKind.SNAPSHOT_END]
    assert list(reader.blocks) == [first, second]
    world.step(A, releases=[1])
    world.prefill(2, [1, 2, 5, 6, 7, 8, 9])  # takes the pool whole: [3, 4] is evicted
    feed.advance(100)
    reader.read()
    assert reader.kinds[2:] == [EventKind.REMOVED, EventKind.PRESSURE, EventKind.STORED]
    assert reader.pressure is PressureLevel.CRITICAL
    third = block_name(first, [5, 6])
    assert list(reader.blocks) == [first, third, block_name(third, [7, 8])]
    world.manager.prefixes.clear()
    feed.advance(100)
    reader.read()
    assert reader.blocks == {}


def test_a_pool_without_watches_has_no_change_log() -> None:
    index = PrefixIndex(8, 1)
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None)
    watches = [feed.open(""), feed.open("")]
    assert index.change_log is not None
    feed.close(watches[0])
    assert index.change_log is not None
    feed.close(watches[1])
    assert index.change_log is None


@pytest.mark.parametrize(
    ("bound", "most", "wants_tokens"),
    [("MAX_WAITING_NAMES", 10, False), ("MAX_WAITING_TOKENS", 20, True)],
    ids=["names", "tokens"],
)
def test_a_reader_that_never_reads_ends_alone_and_its_queue_is_bounded(
    monkeypatch: pytest.MonkeyPatch, bound: str, most: int, wants_tokens: bool
) -> None:
    monkeypatch.setattr(events, bound, most)
    index = PrefixIndex(64, 2)
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None)
    slow, quick = EventReader("", feed.open("", wants_tokens=wants_tokens)), EventReader("", feed.open(""))
    while feed.advance(100):
        pass
    for token in range(11):
        assert not slow.watch.is_lagging
        index.insert_run(index.root(""), int32([token, token]), int32([token + 1]))
        feed.advance(100)
        quick.read()
    assert slow.watch.is_lagging
    assert slow.watch.take_event() is None
    assert not quick.watch.is_lagging
    assert quick.blocks == names_in(index, "")


def test_a_snapshot_with_tokens_comes_in_events_of_so_many_and_waits_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MAX_TOKENS", 8)
    monkeypatch.setattr(events, "MAX_WAITING_TOKENS", 2 * 40)
    index = PrefixIndex(128, 2)
    index.insert_run(index.root(""), int32(range(200)), int32(range(1, 101)))
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None)
    reader, most = EventReader("", feed.open("", wants_tokens=True)), 0
    while not reader.is_complete:
        while feed.advance(4):
            pass
        event = reader.watch.take_event()
        assert event is not None
        most = max(most, len(event.tokens))
        reader.apply(event)
    assert most == 4
    assert not reader.watch.is_lagging
    assert reader.blocks == names_in(index, "")


def test_a_snapshot_waits_for_its_reader_instead_of_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_WAITING_NAMES", 10)
    monkeypatch.setattr(events, "_SNAPSHOT_AHEAD", 5)
    index = PrefixIndex(64, 1)
    index.insert_run(index.root(""), int32(range(50)), int32(range(1, 51)))
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None)
    reader = EventReader("", feed.open(""))
    rounds = 0
    while not reader.is_complete:
        while feed.advance(3):
            pass
        reader.read(1)
        rounds += 1
    assert rounds > 5
    assert not reader.watch.is_lagging
    assert reader.blocks == names_in(index, "")


@pytest.mark.parametrize("by", ["the snapshot", "a block stored below"])
def test_a_slice_is_no_longer_than_its_budget_however_deep_a_block_is(by: str) -> None:
    index = PrefixIndex(64, 1)
    index.insert_run(index.root(""), int32(range(50)), int32(range(1, 51)))
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None)
    reader = EventReader("", feed.open(""))
    reader.watch.next_node = 50  # as if the deepest block had the first number
    if by == "a block stored below":
        index.insert_run(index.match(index.root(""), int32(range(50)), 50)[-1], int32([50]), int32([51]))
    for num_told in range(5, 50, 5):
        assert feed.advance(5)
        reader.read()
        assert len(reader.blocks) == num_told
    while feed.advance(5):
        pass
    reader.read()
    assert reader.blocks == names_in(index, "")


def test_unread_changes_are_bounded() -> None:
    index = PrefixIndex(8, 1)
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None, max_unread=20)
    watch = feed.open("")
    for _ in range(30):
        index.insert_run(index.root(""), int32([1]), int32([1]))
        index.forget_blocks(int32([1]), MatchEnd.EVICTED)
    assert index.change_log is not None
    assert len(index.change_log) <= 20
    assert feed.advance(1) is False
    assert watch.is_lagging


def test_the_feed_is_woken_only_by_the_first_unread_change() -> None:
    index = PrefixIndex(8, 1)
    calls: list[None] = []
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: calls.append(None))
    feed.open("")
    for token in (1, 2):
        index.insert_run(index.root(""), int32([token]), int32([token]))
    assert len(calls) == 1
    while feed.advance(5):
        pass
    index.forget_blocks(int32([1]))
    assert len(calls) == 2
