"""The disk tier without engines: a storm of orders against a naive model and a byte oracle, tens of thousands of them a minute.

A prompt is a few tokens. Content comes to the host tier as a finished swap-out brings it, and each block that a load
brings is compared with what its prefix spells. The naive model is a dictionary of the names that the slab must have.
"""

import random
from collections.abc import Callable

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.tiers.orders import Load, Store, TierRules
from kvkeeper.cache_service.core.values.copies import StoredBlock, TierOrder, TierResult
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Int32Array
from tests.support.worlds.scopes import SCOPES

KEY = b"of a storm"
Content = tuple[str, tuple[int, ...]]  # of a block: scope, and the tokens of the whole prefix


class DiskStorm:
    """One seed: a host tier of a few blocks before a slab of some more."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.choice([1, 2])
        self.config = PoolConfig(num_blocks=4, block_size=self.size, num_host_blocks=rng.choice([3, 6, 17]))
        self.longest = rng.choice([5, 12])  # blocks of a prompt
        self.rules = TierRules(deadline=5.0, most_loading=rng.choice([1, 3, 64]))
        self.num_slots, self.faults = rng.choice([2, 8, 32]), rng.choice([6, 40, 1000])
        self.hosts: dict[int, Content | None] = {}
        self.slab: dict[int, tuple[StoredBlock, int, Content | None]] = {}  # with its era; None: torn
        self.num_orders = self.num_loaded = self.num_damaged = self.num_joined = 0
        self.num_restarts = self.num_clears = self.num_rests = 0
        self.now = 0.0
        self._open(0)

    def _open(self, era: int) -> None:
        self.manager = PoolManager(self.config)
        self.state, swapper = self.manager.state, self.manager.swapper
        assert swapper is not None
        self.host, self.offloader = swapper.host, swapper.offloader
        stored = [block for block, of_era, _ in self.slab.values() if of_era == era]
        self.disk = self.manager.add_disk(KEY, self.num_slots, era, stored, self.rules)
        for scope in SCOPES:
            self.state.index.root(scope)
        self.jobs: list[Load | Store] = []
        # The naive model: names that are stored for sure. An eviction takes the oldest away, so it is asked after each event.
        self.stored = {block.name for block in stored}
        self.num_evicted = 0

    def tick(self) -> None:
        """One event."""
        rng, event = self.rng, self.rng.random()
        if event < 0.25:
            self._fill()
        elif event < 0.4:
            store = self.disk.stores.prepare(rng.randint(1, 4))
            self.jobs += [store] if store else []
        elif event < 0.7:
            scope, tokens = self._prompt()
            loads, _ = self.disk.loads.prepare(self.state.index.root(scope), tokens)
            new = self.disk.loads.take()
            self.num_joined += len(loads) > len(new)
            self.jobs += new
        elif event < 0.99:
            if self.jobs:
                self._run(self.jobs.pop(rng.randrange(len(self.jobs))))
        elif event < 0.993:
            self._advance(rng.choice([0.1, 6.0, 70.0]))
        elif event < 0.9985 and self.slab:
            slot = rng.choice(list(self.slab))
            block, era, _ = self.slab[slot]
            self.slab[slot] = block, era, None
        elif event < 0.99925:
            self.num_clears += 1
            self.manager.prefixes.clear()
            self.stored.clear()
        else:
            self._kill()
        if not self.rng.randrange(8):
            self._check()

    def finish(self) -> None:
        while self.jobs:
            self._run(self.jobs.pop())
            self._check()
        self.manager.prefixes.clear()
        wrong = self.manager.queries.check_invariants()
        assert not wrong, wrong
        stats = self.manager.queries.stats()
        self.num_rests += stats.num_disk_rests
        assert stats.num_free_disk_blocks == self.num_slots, stats
        assert stats.num_free_host_blocks == self.config.num_host_blocks - 1, stats

    def _prompt(self) -> tuple[str, Int32Array]:
        tokens = [self.rng.randrange(2) for _ in range(self.size * self.rng.randint(1, self.longest))]
        return self.rng.choice([SCOPES[0], SCOPES[0], SCOPES[2]]), np.array(tokens, np.int32)

    def _fill(self) -> None:
        """Blocks of a prompt that the index lacks come to the host tier, as from a device: the first one, or as many as fit."""
        scope, tokens = self._prompt()
        root, index = self.state.index.root(scope), self.state.index
        num_blocks = len(tokens) // self.size
        first = len(index.match(root, tokens, num_blocks))
        count = min(num_blocks - first, self.host.pool.num_available, self.rng.choice([1, num_blocks]))
        if not count:
            return
        hosts = self.host.take_blocks(count, held=False)
        path = index.match(root, tokens, first)
        is_there = len(path) == first  # making room has not taken the parent
        node = int(path[-1]) if len(path) else root
        for at, host in enumerate(hosts.tolist() if is_there else [], start=first):
            node, _ = index.insert_on_host(node, tokens[at * self.size : (at + 1) * self.size].astype("<i4").tobytes(), host)
            self.hosts[host] = scope, tuple(tokens[: (at + 1) * self.size].tolist())
        if is_there:
            self.host.pool.mark_indexed(hosts)
        self.host.is_filling[hosts] = False
        for tell in self.offloader.on_filled if is_there else ():
            tell(hosts)
        self.host.pool.end_transfers(hosts[::-1])

    def _run(self, job: Load | Store) -> None:
        results = []
        for order in job.orders:
            self.num_orders += 1
            fails = self.rng.randrange(self.faults) == 1
            if isinstance(job, Store):
                content = self.hosts[order.host]
                block = _stored(order)
                self.slab[order.slot] = block, order.era, None if fails else content
                results.append(TierResult.FAILED if fails else TierResult.DONE)
                continue
            self.hosts[order.host] = None
            found, _, content = self.slab[order.slot]
            assert found.name == order.name, "a slot is read under another name than it was stored under"
            if fails:
                results.append(TierResult.FAILED)
            elif content is None:
                results.append(TierResult.DAMAGED)
                self.num_damaged += 1
            else:
                self.hosts[order.host] = content
                results.append(TierResult.DONE)
        if isinstance(job, Load):
            self.num_loaded += self.disk.loads.complete(job, results)
            self._check_loaded(job)
            ends = zip(job.orders, results, strict=True)
            self.stored -= {order.name for order, result in ends if result is TierResult.DAMAGED}
            return
        self.disk.stores.complete(job, results)
        for order, result in zip(job.orders, results, strict=True):
            if result is TierResult.DONE and order.era == self.disk.flight.era:
                self.stored.add(order.name)

    def _check_loaded(self, load: Load) -> None:
        """Every block of the prompt that the host tier has holds what its prefix spells."""
        scope = self.state.index.roots.scope(load.root)
        nodes = self.state.index.match(load.root, load.tokens, len(load.tokens) // self.size)
        for at, host in enumerate(self.state.index.host_of_node[nodes].tolist()):
            wanted = scope, tuple(load.tokens[: (at + 1) * self.size].tolist())
            assert self.hosts[host] == wanted, (self.hosts[host], wanted)

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        self.manager.state.tick(self.now)
        self.disk.flight.tend()

    def _kill(self) -> None:
        """What was not run never happens; what is being stored is torn, if anything."""
        self.num_restarts += 1
        for job in self.jobs:
            if isinstance(job, Store) and self.rng.random() < 0.5:
                order = job.orders[0]
                self.slab[order.slot] = _stored(order), order.era, None
        self._check()
        self.num_rests += self.disk.flight.breaker.num_rests
        self.hosts.clear()
        self._open(self.disk.flight.era)
        self.manager.state.tick(self.now)

    def _check(self) -> None:
        known = self.disk.directory.names()
        assert known <= self.stored, "the tier has what was never stored"
        num_evicted = self.disk.stats()["num_evicted_disk_blocks"]
        assert len(self.stored - known) <= num_evicted - self.num_evicted, "lost without an eviction"
        self.num_evicted = num_evicted
        self.stored = set(known)
        wrong = self.disk.check()
        assert not wrong, wrong


def _stored(order: TierOrder) -> StoredBlock:
    """As a scan of the slab would find it."""
    return StoredBlock(order.slot, order.name, order.number, order.block_name, order.parent_block_name, order.tokens)


def storm(until: Callable[[DiskStorm], bool], seed: int) -> DiskStorm:
    """Runs one seed until it is enough."""
    world = DiskStorm(seed)
    try:
        while not until(world):
            world.tick()
        world.finish()
    except BaseException as error:
        error.add_note(f"disk storm, seed {seed}")
        raise
    return world
