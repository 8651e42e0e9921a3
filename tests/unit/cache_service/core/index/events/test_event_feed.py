"""A reader that applies the snapshot and the events of a watch has the contents of the index at all times."""

import random

import pytest

from kvkeeper.cache_service.core.index.events import watch as events
from kvkeeper.cache_service.core.index.events.event_feed import EventFeed
from kvkeeper.cache_service.core.index.leaf_walk import LeafWalk
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.types import EventKind, MatchEnd, PressureLevel, Tier
from tests.support.worlds.core_pool import A, CorePool, int32
from tests.support.worlds.event_reader import SPEC_KEY, EventReader, block_name, first_parent, names_in

TENANTS = ("", "a")


class World:
    """An index of a few blocks of one token each, its feed and its readers, driven at random."""

    def __init__(self, seed: int, num_blocks: int = 14) -> None:
        self.dice = random.Random(seed)
        self.index = PrefixIndex(num_blocks, 1)
        self.free = list(range(1, num_blocks))
        self.demoted: dict[int, int] = {}  # node to the block that it had
        self.readers: list[EventReader] = []
        self.feed: EventFeed | None = None
        self.num_told_late = 0  # events of changes during a snapshot

    def insert(self) -> None:
        path = [self.dice.randrange(3) for _ in range(self.dice.randint(1, 5))]
        root = self.index.root(self.dice.choice(TENANTS))
        found = self.index.match(root, int32(path), len(path)).tolist()
        new = path[len(found) :]
        while len(self.free) < len(new):
            self.forget()
            found = self.index.match(root, int32(path), len(path)).tolist()
            new = path[len(found) :]
        blocks = [self.free.pop() for _ in new]
        self.index.insert_run(found[-1] if found else root, int32(new), int32(blocks))

    def forget(self) -> None:
        used = self.index.node_of_block.nonzero()[0].tolist()
        blocks = self.dice.sample(used, min(len(used), self.dice.randint(1, 2)))
        lost = self.index.forget_blocks(int32(blocks)).tolist()
        self.free += blocks + [block for block in lost if block]
        self._settle()

    def clear(self) -> None:
        walk = LeafWalk(self.index)
        while not walk.is_over:
            lost = self.index.forget_nodes(walk.take_nodes(self.dice.randint(1, 9)), MatchEnd.CLEARED)
            self.free += [block for block in lost.tolist() if block]
        self._settle()

    def change_tier(self) -> None:
        nodes = self.index.node_of_block[self.index.node_of_block > 0].tolist()
        if self.demoted and self.dice.random() < 0.5:
            node, tier = self.dice.choice(list(self.demoted)), Tier.DEVICE
            self.index.block_of_node[node] = self.demoted[node]
            self.index.node_of_block[self.demoted.pop(node)] = node
        elif nodes:
            node, tier = self.dice.choice(nodes), Tier.HOST
            self.demoted[node] = int(self.index.block_of_node[node])
            self.index.node_of_block[self.demoted[node]] = self.index.block_of_node[node] = 0
        else:
            return
        if self.index.change_log is not None:
            self.index.change_log.tier_changed(int32([node]), tier)

    def _settle(self) -> None:
        """Demoted blocks that were forgotten with their ancestors give their host blocks back too."""
        for node in [node for node in self.demoted if self.index.key(node) is None]:
            self.free.append(self.demoted.pop(node))

    def open(self) -> None:
        if self.feed is None or not self.feed.watches:
            self.feed = EventFeed(self.index, SPEC_KEY, PressureLevel.LOW, lambda: None)
        tenant = self.dice.choice(TENANTS)
        self.readers.append(EventReader(tenant, self.feed.open(tenant, wants_tokens=self.dice.random() < 0.5)))

    def close(self) -> None:
        if self.readers:
            assert self.feed is not None
            self.feed.close(self.readers.pop(self.dice.randrange(len(self.readers))).watch)

    def advance(self) -> None:
        if self.feed is not None:
            self.feed.advance(self.dice.randint(1, 6))
        for reader in self.readers:
            late = [event.kind for event in reader.watch._events if event.kind is not EventKind.SNAPSHOT]
            self.num_told_late += not reader.is_complete and EventKind.REMOVED in late
            reader.read(self.dice.randint(0, 3))

    def check(self) -> None:
        while self.feed is not None and self.feed.advance(1000):
            pass
        for reader in self.readers:
            reader.read()
            assert reader.is_complete
            assert reader.blocks == names_in(self.index, reader.tenant)


@pytest.mark.parametrize("first_seed", range(0, 60, 10))
def test_snapshot_and_events_are_the_index_of_the_tenant(first_seed: int) -> None:
    num_told_late = 0
    for seed in range(first_seed, first_seed + 10):
        world = World(seed)
        doings = [world.insert] * 6 + [world.forget] * 3 + [world.change_tier] * 3 + [world.advance] * 6
        doings += [world.open, world.close, world.check]
        for _ in range(400):
            world.dice.choice(doings)()
            if world.dice.random() < 0.01:
                world.clear()
        world.check()
        num_told_late += world.num_told_late
    assert num_told_late > 0, "nothing was removed during a snapshot: the world is too slow for its feed"


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


def test_a_reader_that_never_reads_ends_alone_and_its_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_WAITING_NAMES", 10)
    index = PrefixIndex(64, 1)
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None)
    slow, quick = EventReader("", feed.open("")), EventReader("", feed.open(""))
    while feed.advance(100):
        pass
    for token in range(11):
        assert not slow.watch.is_lagging
        index.insert_run(index.root(""), int32([token]), int32([token + 1]))
        feed.advance(100)
        quick.read()
    assert slow.watch.is_lagging
    assert slow.watch.take_event() is None
    assert not quick.watch.is_lagging
    assert quick.blocks == names_in(index, "")


def test_a_reader_of_tokens_may_leave_so_many_tokens_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_WAITING_TOKENS", 20)
    index = PrefixIndex(64, 2)
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None)
    slow, nameless = feed.open("", wants_tokens=True), feed.open("")
    while feed.advance(100):
        pass
    for token in range(11):
        assert not slow.is_lagging
        index.insert_run(index.root(""), int32([token, token]), int32([token + 1]))
        feed.advance(100)
    assert slow.is_lagging
    assert not nameless.is_lagging


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
