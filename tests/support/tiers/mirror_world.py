"""A DiskWorld with a remote store behind its disk, and what mirrors of its events should have.

The store outlives the pool, forgets, and is asked as a server would be. The oracle walks the tiers from a tenant's root, by the
names that the tiers themselves use, and knows nothing of how events are made.
"""

from dataclasses import dataclass, field
from typing import Any

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.tiers.content_tier import ContentTier
from kvkeeper.cache_service.core.tiers.lookup import ContentNames
from kvkeeper.cache_service.core.tiers.orders import Load, Question, Store, TierRules
from kvkeeper.cache_service.core.values.copies import TierOrder, TierResult
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Tier
from tests.support.reference.tier_memory import GARBAGE
from tests.support.tiers.disk_world import KEY, DiskWorld
from tests.support.worlds.engine_model import Choose
from tests.support.worlds.event_reader import first_parent, name_behind

REMOTE_KEY = b"of a store"
Ever = dict[Tier, dict[bytes, set[bytes]]]  # by tier: the tokens that were ever stored behind each name


@dataclass
class Outliving:
    """What a kill leaves. values: of the store, by name."""

    values: dict[bytes, list[int]] = field(default_factory=dict)
    ever: Ever = field(default_factory=lambda: {Tier.DISK: {}, Tier.REMOTE: {}})

    def note(self, tier: Tier, order: TierOrder) -> None:
        self.ever[tier].setdefault(order.parent, set()).add(order.tokens)


class MirrorWorld(DiskWorld):
    """Every tier is on."""

    def __init__(
        self,
        config: PoolConfig,
        num_slots: int,
        rules: TierRules,
        *,
        outliving: Outliving,
        disk_tenants: frozenset[str] | None = None,
        **kept: Any,
    ) -> None:
        """disk_tenants: whose blocks the disk takes; None: those of all. The store takes those of all."""
        super().__init__(config, num_slots, rules._replace(tenants=disk_tenants), **kept)
        self.outliving = outliving
        self.remote = self.manager.add_remote(REMOTE_KEY, rules._replace(name="remote", most_asked=6))
        self._remote_jobs: list[Load | Store | Question] = []

    def pass_time(self, seconds: float) -> None:
        super().pass_time(seconds)
        self.remote.flight.tend()

    def store_remotely(self, max_blocks: int) -> None:
        store = self.remote.stores.prepare(max_blocks)
        self._remote_jobs += [store] if store is not None else []

    def forget_remotely(self, choose: Choose) -> None:
        """Others make the store forget."""
        values = self.outliving.values
        if values:
            del values[list(values)[choose(len(values))]]

    def clear(self) -> None:
        super().clear()
        self.outliving.values.clear()

    def work_remotely(self, choose: Choose, faults: int) -> None:
        """One job is run and reported."""
        self._remote_jobs += [*self.remote.questions.take(), *self.remote.loads.take()]
        if not self._remote_jobs:
            return
        job = self._remote_jobs.pop(choose(len(self._remote_jobs)))
        if isinstance(job, Question):
            fails = choose(faults) == 1
            there = next((at for at, name in enumerate(job.names) if name not in self.outliving.values), len(job.names))
            self.remote.complete_question(job, None if fails else there)
            return
        results = [self._run_remotely(job, order, fails=choose(faults) == 1) for order in job.orders]
        if isinstance(job, Store):
            self.remote.stores.complete(job, results)
        else:
            self.remote.loads.complete(job, results)

    def _run(self, what: Load | Store, order: TierOrder, *, fails: bool) -> TierResult:
        if isinstance(what, Store):
            self.outliving.note(Tier.DISK, order)
        return super()._run(what, order, fails=fails)

    def _run_remotely(self, job: Load | Store, order: TierOrder, *, fails: bool) -> TierResult:
        host, values = self.memory.host, self.outliving.values
        if isinstance(job, Store):
            self.outliving.note(Tier.REMOTE, order)
            if not fails and order.era == self.remote.flight.era:
                values[order.name] = list(host[order.host])
            return TierResult.FAILED if fails else TierResult.DONE
        host[order.host] = [GARBAGE] * self.config.block_size
        if fails:
            return TierResult.FAILED
        if order.name not in values:
            return TierResult.MISSING
        host[order.host] = list(values[order.name])
        return TierResult.DONE

    def kill(self, choose: Choose) -> None:
        super().kill(choose)
        for slot in self.slab.values():  # one that was being written has a name and torn content
            self.outliving.note(Tier.DISK, slot.order)

    def finish_disk(self) -> None:
        super().finish_disk()
        while self._remote_jobs or self.remote.flight.loads or self.remote.flight.stores or self.remote.flight.questions:
            self.work_remotely(lambda count: 0, 10**9)


def reached(manager: PoolManager, tiers: list[tuple[ContentTier, bytes]], ever: Ever, tenant: str) -> dict[bytes, Tier]:
    """Every block that can be reached for the tenant, and the nearest tier of each. tiers: those below, each with its key."""
    index = manager.state.index
    below = [(tier.tier, tier.directory.names(), ContentNames(index, key)) for tier, key in tiers]
    found: dict[bytes, Tier] = {}
    above = [(index.find_root(tenant), first_parent(tenant), [names.first(tenant) for *_, names in below])]
    while above:
        parent, parent_name, contents = above.pop()
        nodes = {index.key_tokens(node)[1].tobytes(): node for node in index.links.children(parent, 10**9)} if parent else {}
        pieces = set(nodes)
        for (tier, *_), content in zip(below, contents, strict=True):
            pieces |= ever[tier].get(content, set())
        for tokens in pieces:
            node = nodes.get(tokens, 0)
            children = [names.child(content, tokens) for (*_, names), content in zip(below, contents, strict=True)]
            have = [tier for (tier, stored, _), content in zip(below, children, strict=True) if content in stored]
            if node:
                have.insert(0, Tier.DEVICE if index.block_of_node[node] else Tier.HOST)
            if have:
                name = name_behind(parent_name, tokens)
                found[name] = have[0]
                above.append((node, name, children))
    return found


def disk_and_remote(world: MirrorWorld) -> list[tuple[ContentTier, bytes]]:
    return [(world.disk, KEY), (world.remote, REMOTE_KEY)]
