"""Blocks below the host tier by hand: each is told once all before it are, and goes when one of them goes."""

from kvkeeper.cache_service.core.index.below_blocks import BelowBlocks, TierBlocks
from kvkeeper.cache_service.core.index.events.event_feed import EventFeed
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.types import EventKind, PressureLevel, Tier
from tests.support.worlds.core_pool import int32
from tests.support.worlds.event_reader import SPEC_KEY, EventReader, block_name, first_parent

DISK, REMOTE = Tier.DISK, Tier.REMOTE


class Told:
    """An index with a disk and a remote tier, and a mirror of it. Blocks are of one token; a prompt is 1, 2, 3, and so on."""

    def __init__(self, num_blocks: int = 16, tenant: str = "") -> None:
        self.index, self.below, self.tenant = PrefixIndex(num_blocks, 1), BelowBlocks(), tenant
        self.disk, self.remote = (TierBlocks(tier, self.index) for tier in (DISK, REMOTE))
        self.below.tiers += [self.disk, self.remote]
        self.feed = EventFeed(self.index, SPEC_KEY, PressureLevel.LOW, lambda: None, below=self.below)
        self.reader = EventReader(tenant, self.feed.open(tenant))

    def name(self, length: int, tenant: str = "") -> bytes:
        name = first_parent(tenant)
        for token in range(1, length + 1):
            name = block_name(name, [token])
        return name

    def gain(self, tier: TierBlocks, *lengths: int, tenant: str = "") -> None:
        """The tier has the last block of prompts of these lengths."""
        for length in lengths:
            tokens = int32([length]).tobytes()
            tier.gain(self.name(length, tenant), self.name(length - 1, tenant), tokens)

    def lose(self, tier: TierBlocks, *lengths: int) -> None:
        for length in lengths:
            tier.lose(self.name(length))

    def compute(self, length: int) -> None:
        """The device has a prompt of this length."""
        self.index.insert_run(self.index.root(""), int32(range(1, length + 1)), int32(range(1, length + 1)))

    def mirror(self, reader: EventReader | None = None) -> dict[int, Tier]:
        """By length."""
        reader = reader or self.reader
        while self.feed.advance(2):
            reader.read(1)
        reader.read()
        lengths = {self.name(length, reader.tenant): length for length in range(1, 16)}
        return {lengths[name]: tier for name, tier in sorted(reader.blocks.items(), key=lambda each: lengths[each[0]])}

    def snapshot(self) -> dict[int, Tier]:
        reader = EventReader(self.tenant, self.feed.open(self.tenant, wants_tokens=True))
        found = self.mirror(reader)
        self.feed.close(reader.watch)
        return found


def test_a_block_goes_from_tier_to_tier_until_none_has_it() -> None:
    told = Told()
    told.compute(2)
    told.mirror()
    told.gain(told.disk, 1, 2)
    told.gain(told.remote, 1, 2)
    assert told.mirror() == {1: Tier.DEVICE, 2: Tier.DEVICE}
    told.index.forget_blocks(int32([1]))
    assert told.mirror() == told.snapshot() == {1: DISK, 2: DISK}
    told.lose(told.disk, 2)
    assert told.mirror() == told.snapshot() == {1: DISK, 2: REMOTE}
    told.lose(told.remote, 2)
    assert told.mirror() == told.snapshot() == {1: DISK}
    told.lose(told.disk, 1)
    assert told.mirror() == {1: REMOTE}
    assert EventKind.REMOVED in told.reader.kinds
    assert len([kind for kind, _ in told.reader.told if kind in (EventKind.SNAPSHOT, EventKind.STORED)]) == 2, "none twice"


def test_what_nothing_leads_to_is_told_once_something_does() -> None:
    told = Told()
    told.gain(told.disk, 2, 3, 5)
    assert told.mirror() == told.snapshot() == {}
    told.compute(1)
    assert told.mirror() == told.snapshot() == {1: Tier.DEVICE, 2: DISK, 3: DISK}
    told.gain(told.remote, 4)
    assert told.mirror() == told.snapshot() == {1: Tier.DEVICE, 2: DISK, 3: DISK, 4: REMOTE, 5: DISK}
    told.index.forget_blocks(int32([1]))
    assert told.mirror() == told.snapshot() == {}
    told.compute(2)
    wanted = {1: Tier.DEVICE, 2: Tier.DEVICE, 3: DISK, 4: REMOTE, 5: DISK}
    assert told.mirror() == told.snapshot() == wanted


def test_a_tier_that_is_cleared_is_one_change_and_leaves_what_others_have() -> None:
    told = Told()
    told.gain(told.disk, *range(1, 9))
    told.gain(told.remote, 1, 2)
    assert told.mirror() == dict.fromkeys(range(1, 9), DISK)
    assert told.index.change_log is not None
    told.disk.clear()
    assert len(told.index.change_log) == 1
    assert told.mirror() == told.snapshot() == {1: REMOTE, 2: REMOTE}
    assert (len(told.disk), list(told.disk.children(told.name(0)))) == (0, [])


def test_a_tenant_is_told_before_it_has_a_root_and_is_told_of_no_other() -> None:
    told = Told(tenant="b")
    told.gain(told.disk, 1, 2, tenant="a")
    told.gain(told.disk, 1, tenant="b")
    other = EventReader("a", told.feed.open("a"))
    assert told.mirror(other) == {1: DISK, 2: DISK}
    assert told.mirror() == {1: DISK}
    told.compute(3)  # of a third tenant
    assert told.mirror(other) == {1: DISK, 2: DISK}
    assert told.mirror() == {1: DISK}


def test_a_slice_ends_with_its_budget_however_much_lies_below() -> None:
    told = Told()
    told.gain(told.disk, *range(1, 16))
    most = 0
    while not told.reader.is_complete:
        before = len(told.reader.blocks)
        told.feed.advance(3)
        told.reader.read()
        most = max(most, len(told.reader.blocks) - before)
    assert most <= 4
    assert len(told.reader.blocks) == 15
    told.lose(told.disk, 1)
    told.feed.advance(3)
    told.reader.read()
    assert 10 <= len(told.reader.blocks) < 15, "what was behind it goes slice by slice"
    assert told.mirror() == {}


def test_what_is_to_be_told_is_bounded_by_what_is_below_while_a_reader_rests() -> None:
    told = Told(num_blocks=4)
    for _ in range(50):
        for length in range(1, 4):
            told.gain(told.disk, length)
        told.feed.advance(1)
        for length in range(1, 4):
            told.lose(told.disk, length)
        told.feed.advance(100)
        (view,) = told.feed._views
        assert len(view._wanted) + len(view._doubted) <= 3


def test_two_watches_of_a_tenant_share_what_they_were_told() -> None:
    told = Told()
    told.gain(told.disk, 1, 2)
    told.mirror()
    second = EventReader("", told.feed.open(""))
    assert told.mirror(second) == {1: DISK, 2: DISK}
    assert len(told.feed._views) == 1
    told.feed.close(told.reader.watch)
    told.lose(told.disk, 2)
    assert told.mirror(second) == {1: DISK}
    told.feed.close(second.watch)
    assert not told.feed._views
