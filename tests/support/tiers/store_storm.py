"""A storm of orders of two cache services with different pools on one remote store, which fails, lies, forgets and hangs.

Each service has a host tier of its own size and a disk or none; the store is a dictionary that both share. Content comes to a
host tier as a finished swap-out brings it. Every block that a load brings, to whichever service and from whichever tier, is
compared with what its prefix spells; nothing that was stored before a clearing may come from the store after it.
"""

import random

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.tiers.content_tier import ContentTier
from kvkeeper.cache_service.core.tiers.orders import Load, Question, Store, TierRules
from kvkeeper.cache_service.core.values.copies import TierOrder, TierResult
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import Executor, Int32Array, SequenceId, SessionId, Tier
from tests.support.tiers.mirror_world import Ever
from tests.support.worlds.core_pool import int32
from tests.support.worlds.event_reader import SPEC_KEY
from tests.support.worlds.scopes import SCOPES

KEY, DISK_KEY, SESSION = b"of a storm", b"a disk", SessionId("storm")
_MOST_SEQUENCES = 8
Content = tuple[str, tuple[int, ...]]  # of a block: scope, and the tokens of the whole prefix


class SharedStore:
    """What lies in the store by name, None for a damaged value."""

    def __init__(self) -> None:
        self.values: dict[bytes, Content | None] = {}
        self.ever: dict[bytes, set[bytes]] = {}  # the tokens that were ever stored behind each name
        self.num_clears = 0

    def clear(self) -> None:
        self.values.clear()
        self.num_clears += 1


class Service:
    """One cache service. Its disk, where it has one, is a dictionary of its own."""

    def __init__(self, rng: random.Random, size: int, store: SharedStore, *, has_disk: bool) -> None:
        self.rng, self.size, self.store = rng, size, store
        num_hosts = rng.choice([5, 9, 17])
        config = PoolConfig(rng.choice([4, 7]), size, max_sequences=16, num_host_blocks=num_hosts)
        self.manager = PoolManager(config, spec_key=SPEC_KEY)
        self.ever: Ever = {Tier.DISK: {}, Tier.REMOTE: store.ever}
        self.manager.sessions.open(SESSION, Executor.CACHE)
        rules = TierRules(deadline=5.0, most_loading=rng.choice([2, 64]), weighs=rng.random() < 0.5)
        self.tiers: list[ContentTier] = []
        self.slab: dict[int, tuple[bytes, Content | None]] = {}
        if has_disk:
            self.tiers.append(self.manager.add_disk(DISK_KEY, rng.choice([4, 16]), 0, (), rules))
        self.remote = self.manager.add_remote(KEY, rules._replace(name="remote", most_asked=rng.choice([4, 16])))
        self.tiers.append(self.remote)
        swapper = self.manager.swapper
        assert swapper is not None
        self.host, self.offloader, self.index = swapper.host, swapper.offloader, self.manager.state.index
        scopes = list(SCOPES)
        rng.shuffle(scopes)  # roots have other numbers in the other service
        for scope in scopes:
            self.index.root(scope)
        self.hosts: dict[int, Content | None] = {}
        self.jobs: list[tuple[ContentTier, Load | Store | Question]] = []
        self.sequences: list[int] = []
        self.num_orders = self.num_remote_orders = self.num_loaded = self.num_created = self.num_faults = 0

    def prompt(self, longest: int) -> tuple[str, Int32Array]:
        tokens = [self.rng.randrange(2) for _ in range(self.size * self.rng.randint(1, longest))]
        return self.rng.choice(SCOPES), int32(tokens)

    def ask(self, scope: str, tokens: Int32Array) -> None:
        """A sequence is created, so that what it lacks is looked for below."""
        if len(self.sequences) == _MOST_SEQUENCES:
            self.manager.one_item.release(SESSION, self.sequences.pop(self.rng.randrange(_MOST_SEQUENCES)))
        self.num_created += 1
        self.sequences.append(self.num_created)
        most = self.manager.state.config.limit_tokens
        self.manager.creation.create(SESSION, SequenceArgs(SequenceId(self.num_created), tokens[:most], scope=scope))
        slot = self.manager.state.session(SESSION).ids.get(self.num_created)
        assert slot is not None
        self.manager.state.below.length_to_come(slot, len(tokens))  # type: ignore[union-attr]
        self.take()

    def keyed_tiers(self) -> list[tuple[ContentTier, bytes]]:
        """Those below the host tier, each with the key of its names."""
        return [(tier, KEY if tier is self.remote else DISK_KEY) for tier in self.tiers]

    def take(self) -> None:
        for tier in self.tiers:
            self.jobs += [(tier, each) for each in (*tier.questions.take(), *tier.loads.take())]

    def fill(self, scope: str, tokens: Int32Array) -> None:
        """Blocks of a prompt that the index lacks come to the host tier, as from a device."""
        root, num_blocks = self.index.root(scope), len(tokens) // self.size
        first = len(self.index.match(root, tokens, num_blocks))
        count = min(num_blocks - first, self.host.pool.num_available)
        if not count:
            return
        hosts = self.host.take_blocks(count, held=False)
        path = self.index.match(root, tokens, first)
        is_there = len(path) == first  # making room has not taken the parent
        node = int(path[-1]) if len(path) else root
        for at, host in enumerate(hosts.tolist() if is_there else [], start=first):
            piece = tokens[at * self.size : (at + 1) * self.size].astype("<i4").tobytes()
            node, _ = self.index.insert_on_host(node, piece, host)
            self.hosts[host] = scope, tuple(tokens[: (at + 1) * self.size].tolist())
        if is_there:
            self.host.pool.mark_indexed(hosts)
        self.host.is_filling[hosts] = False
        for tell in self.offloader.on_filled if is_there else ():
            tell(hosts)
        self.host.pool.end_transfers(hosts[::-1])

    def store_some(self) -> None:
        tier = self.rng.choice(self.tiers)
        store = tier.stores.prepare(self.rng.randint(1, 8))
        self.jobs += [(tier, store)] if store is not None else []

    def work(self, faults: int) -> None:
        """One job of any tier is run and reported."""
        if not self.jobs:
            return
        tier, job = self.jobs.pop(self.rng.randrange(len(self.jobs)))
        if isinstance(job, Question):
            fails = self.rng.randrange(faults) == 1
            self.num_faults += fails
            there = next((at for at, name in enumerate(job.names) if name not in self.store.values), len(job.names))
            tier.complete_question(job, None if fails else there)
            self.take()
            return
        results = [self._run(tier, job, order, faults) for order in job.orders]
        self.num_orders += len(results)
        self.num_remote_orders += len(results) if tier is self.remote else 0
        if isinstance(job, Store):
            tier.stores.complete(job, results)
            return
        self.num_loaded += tier.loads.complete(job, results)
        self._check_loaded(job)

    def _run(self, tier: ContentTier, job: Load | Store, order: TierOrder, faults: int) -> TierResult:
        fails = self.rng.randrange(faults) == 1
        self.num_faults += fails
        is_remote = tier is self.remote
        if isinstance(job, Store):
            content = None if fails else self.hosts[order.host]
            self.ever[tier.tier].setdefault(order.parent, set()).add(order.tokens)
            if is_remote and not fails and order.era == tier.flight.era:
                self.store.values[order.name] = content
            elif not is_remote:
                self.slab[order.slot] = order.name, content
            return TierResult.FAILED if fails else TierResult.DONE
        self.hosts[order.host] = None
        if fails:
            return TierResult.FAILED
        name, value = (order.name, self.store.values.get(order.name)) if is_remote else self.slab[order.slot]
        assert name == order.name, "a slot is read under another name than it was stored under"
        if is_remote and order.name not in self.store.values:
            return TierResult.MISSING
        if value is None:
            self.store.values.pop(order.name, None) if is_remote else None
            return TierResult.DAMAGED
        self.hosts[order.host] = value
        return TierResult.DONE

    def _check_loaded(self, load: Load) -> None:
        """Every block of the prompt that the host tier has holds what its prefix spells."""
        scope = self.index.roots.scope(load.root)
        nodes = self.index.match(load.root, load.tokens, len(load.tokens) // self.size)
        for at, host in enumerate(self.index.host_of_node[nodes].tolist()):
            wanted = scope, tuple(load.tokens[: (at + 1) * self.size].tolist())
            assert self.hosts[host] == wanted, (self.hosts[host], wanted)

    def check(self) -> None:
        wrong = [text for tier in self.tiers for text in tier.check()]
        assert not wrong, wrong

    def finish(self) -> None:
        while self.jobs:
            self.work(1_000_000)
        for sequence_id in self.sequences:
            self.manager.one_item.release(SESSION, sequence_id)
        self.manager.prefixes.clear()
        wrong = self.manager.queries.check_invariants()
        assert not wrong, wrong
        assert self.manager.queries.stats().num_free_host_blocks == self.host.num_blocks - 1


class StoreStorm:
    """One seed: a service with a disk and one without, and the store of both."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size, self.longest, self.faults = rng.choice([1, 2]), rng.choice([6, 12]), rng.choice([6, 40, 1000])
        self.store, self.now = SharedStore(), 0.0
        self.services = [Service(rng, self.size, self.store, has_disk=has_disk) for has_disk in (True, False)]
        self.num_forgotten = self.num_damaged = 0

    @property
    def num_orders(self) -> int:
        return sum(service.num_orders for service in self.services)

    def tick(self) -> None:
        """One event in one of the services, or in the store."""
        rng, service, event = self.rng, self.rng.choice(self.services), self.rng.random()
        if event < 0.15:
            service.fill(*service.prompt(self.longest))
        elif event < 0.3:
            service.store_some()
        elif event < 0.55:
            service.ask(*service.prompt(self.longest))
        elif event < 0.95:
            service.work(self.faults)
        elif event < 0.97:
            self.now += rng.choice([0.1, 1.0, 6.0, 70.0])
            for each in self.services:
                each.manager.state.tick(self.now)
                # so that loads pay now and then
                each.manager._prompts.seconds.add(rng.randint(1, 9), rng.choice([0.001, 30.0]))
                for tier in each.tiers:
                    tier.flight.tend()
        elif event < 0.98 and self.store.values:
            self.store.values[rng.choice(list(self.store.values))] = None
            self.num_damaged += 1
        elif event < 0.999 and self.store.values:
            del self.store.values[rng.choice(list(self.store.values))]
            self.num_forgotten += 1
        elif event >= 0.999:
            self.store.clear()
            service.manager.prefixes.clear()
        if not rng.randrange(16):
            service.check()

    def finish(self) -> None:
        for service in self.services:
            service.finish()


def store_storm(num_orders: int, seed: int) -> StoreStorm:
    """Runs one seed until so many orders were run."""
    world = StoreStorm(seed)
    try:
        while world.num_orders < num_orders:
            world.tick()
        world.finish()
    except BaseException as error:
        error.add_note(f"store storm, seed {seed}")
        raise
    return world
