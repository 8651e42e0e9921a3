"""Routers that lose messages have what a pool with every tier on has, whichever side is restarted."""

import random
from collections import Counter

import msgspec
import pytest

from kvkeeper.cache_service.core.index.events.event_feed import EventFeed
from kvkeeper.cache_service.core.index.events.watch import Event
from kvkeeper.cache_service.core.values.types import Tier
from kvkeeper.cache_service.rpc.convert.reports import watch_event
from kvkeeper.cli.publishing.kv_events import number, sha256_cbor
from kvkeeper.cli.publishing.publication import Batch, Publication
from tests.sim.test_mirrors import Mirrors, open_feed
from tests.support.slices import todays
from tests.support.tiers.mirror_world import disk_and_remote, reached
from tests.support.worlds.event_reader import EventReader, first_parent
from tests.support.worlds.scopes import SCOPES

NUM_SEEDS, EACH, NUM_OPERATIONS = 1_000, 10, 400
SEED = "a seed"
PLACES = {
    Tier.DEVICE: ("GPU", None),
    Tier.HOST: ("CPU", None),
    Tier.DISK: ("STORAGE", "LOCAL"),
    Tier.REMOTE: ("STORAGE", "REMOTE"),
}


class Router:
    """A subscriber as vLLM's example is: it asks for what it missed by the number behind the last one that it had."""

    def __init__(self) -> None:
        self.blocks: dict[int, set[tuple[str, str | None]]] = {}
        self.parents: dict[int, int | None] = {}
        self.last = -1
        self.num_lost = self.num_cleared = 0

    def receive(self, batch: Batch, publication: Publication) -> None:
        assert batch[0] > self.last, "a number that went back"
        if batch[0] > self.last + 1:
            self.catch_up(publication)
        else:
            self.apply(*batch)

    def catch_up(self, publication: Publication) -> None:
        replayed = list(publication.replay(self.last + 1))
        self.num_lost += len(replayed)
        for batch in replayed:
            self.apply(*batch)

    def apply(self, batch_number: int, payload: bytes) -> None:
        assert batch_number > self.last, "a number that went back"
        self.last = batch_number
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0 and events
        awaited: set[int] = set()  # parents that are not there; within a batch they do not come late
        for event in events:
            place = event.get("medium"), event.get("locality")
            if event["type"] == "BlockStored":
                parent = event["parent_block_hash"]
                assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                for block in event["block_hashes"]:
                    assert block not in awaited, "told of before its parent"
                    awaited |= {parent} - {None, *self.blocks}
                    self.blocks.setdefault(block, set()).add(place)
                    self.parents[block] = parent
                    parent = block
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    self.blocks.get(block, set()).discard(place)
            else:
                assert event == {"type": "AllBlocksCleared"}
                self.blocks.clear()
                self.num_cleared += 1


class Publisher(EventReader):
    """One watch of the publisher: its events go through the messages of the protocol."""

    def __init__(self, published: "Published", feed: EventFeed) -> None:
        tenant = published.tenant
        super().__init__(tenant, feed.open(tenant, wants_tokens=True))
        self.published = published
        names = {"salt": tenant, "seed": SEED}
        published.send(published.publication.begin(first_parent(tenant), published.world.config.block_size, **names))

    def apply(self, event: Event) -> None:
        super().apply(event)
        for name, parent, tokens in zip(event.names, event.parents, event.tokens, strict=False):
            self.published.content[name] = parent, tokens
        if batch := self.published.publication.publish(watch_event(event, len(self.kinds))):
            self.published.send(batch)


class Published(Mirrors):
    """One seed: a publisher that keeps few batches and is restarted, too, and routers that lose messages or come late."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.tenant = self.chance.choice(SCOPES)
        self.content: dict[bytes, tuple[bytes, bytes]] = {}
        self.routers = [Router()]
        self.num_publishers, self.now = 0, 1e9
        self.publisher: Publisher | None = None
        self.publishing: Counter[str] = Counter()
        self._restart()
        super().__init__(seed)

    def send(self, batch: Batch) -> None:
        for router in self.routers:
            if self.chance.random() < 0.8:
                router.receive(batch, self.publication)

    def _restart(self) -> None:
        self.now += self.chance.choice([0.001, 1.0])
        self.publication = Publication(self.chance.choice([1, 4, 50]), self.now)
        self.num_publishers += 1
        if self.publisher in getattr(self, "readers", []):
            self.readers.remove(self.publisher)
            self.feed.close(self.publisher.watch)
        self.publisher = None

    def _tick(self) -> None:
        super()._tick()
        if self.chance.random() < 0.02:
            self._restart()
        if self.chance.random() < 0.005:
            self.publishing["late"] += 1
            self.routers = [*self.routers[-2:], Router()]

    def _read(self) -> None:
        if self.publisher not in self.readers:
            if not self.feed.watches:
                self.feed = open_feed(self.world.manager)
            self.publisher = Publisher(self, self.feed)
            self.readers.append(self.publisher)
        super()._read()

    def _check(self) -> None:
        super()._check()
        if self.publisher not in self.readers:
            return
        wanted = reached(self.world.manager, disk_and_remote(self.world), self.outliving.ever, self.tenant)
        expected = {self._number(name): {PLACES[tier]} for name, tier in wanted.items()}
        for router in self.routers:
            router.catch_up(self.publication)
            assert {block: places for block, places in router.blocks.items() if places} == expected
            assert {router.parents[block] for block in expected} <= {None, *expected}
        self.publishing.update({"blocks": len(expected), "checks": len(self.routers)})

    def _number(self, name: bytes) -> int:
        return number(self._hash(name))

    def _hash(self, name: bytes) -> bytes:
        parent, tokens = self.content[name]
        ids = memoryview(tokens).cast("i").tolist()
        if parent == first_parent(self.tenant):
            return sha256_cbor((sha256_cbor(SEED), ids, (("cache_salt", self.tenant),) if self.tenant else None))
        return sha256_cbor((self._hash(parent), ids, None))


@pytest.mark.parametrize("first_seed", todays(range(0, NUM_SEEDS, EACH), 3))
def test_routers_have_what_can_be_reached_in_every_tier(first_seed: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + EACH):
        published = Published(seed)
        try:
            published.run(NUM_OPERATIONS)
        except BaseException as error:
            error.add_note(f"published, seed {seed}")
            raise
        counts += published.publishing
        counts.update(
            services=published.num_restarts,
            publishers=published.num_publishers,
            lost=sum(router.num_lost for router in published.routers),
        )
    assert counts["services"] > EACH
    assert counts["publishers"] >= 5 * EACH
    assert min(counts["blocks"], counts["lost"]) >= 50
    assert counts["late"] > 0
