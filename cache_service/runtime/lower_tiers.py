"""LowerTiers: the disk tier and the remote tier that a pool is made with, by the configuration."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.threads import in_thread

from ..config import CacheConfig
from ..core.manager import PoolManager
from ..core.tiers.content_tier import ContentTier
from ..core.tiers.orders import TierRules
from ..core.values.kv_spec import KvSpec
from ..memory.arena import ByteArray
from ..memory.disk.disk_directory import DiskDirectory
from ..memory.disk.slab import Slab
from ..memory.remote.open_remote import RemoteMaker
from .pool_tier import Place, PoolTier

log = structlog.get_logger()

_MOST_ASKED = 1024  # blocks of a prompt, in one question to a remote server


@dataclass(frozen=True, slots=True)
class TierMaker:
    """A PoolTierMaker, of a place that is open."""

    tier: ContentTier
    place: Place
    now: Callable[[], float]
    give_back: Callable[[], None]

    def __call__(self, manager: PoolManager, hosts: ByteArray) -> PoolTier:
        return PoolTier(manager, self.tier, self.place, hosts, self.now, self.give_back)

    def drop(self) -> None:
        """There will be no pool."""
        self.place.close()
        self.give_back()


class LowerTiers:
    """Opens the tiers of pools. disks: where pools have their disk tier. remote: makes the remote store of each pool."""

    def __init__(
        self,
        config: CacheConfig,
        disks: DiskDirectory | None = None,
        remote: RemoteMaker | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """now: the clock that gives tiers the time."""
        self._config = config
        self._disks = disks
        self._remote = remote
        self._now = now

    async def reserve(self) -> None:
        """The space on the disk. Raises OutOfMemory."""
        if self._disks is not None:
            await in_thread(self._disks.reserve)

    async def make_disk_tier(self, spec: KvSpec, manager: PoolManager) -> TierMaker | None:
        """The disk tier of a pool, with what earlier runs have left. A disk that cannot be had costs hits, not the pool."""
        if self._disks is None:
            return None
        try:
            slab: Slab = await in_thread(self._disks.obtain, spec)
            try:
                stored = await in_thread(slab.scan)
            except BaseException:
                slab.close()
                self._disks.give_back(slab)
                raise
        except (OutOfMemory, OSError) as error:
            log.warning("disk_refused", model_id=spec.model_id, why=str(error))
            return None
        tier = manager.add_disk(slab.name_key, slab.form.num_slots, slab.era, stored, self._rules("disk", 0))
        return TierMaker(tier, slab, self._now, partial(self._disks.give_back, slab))

    def make_remote_tier(self, spec: KvSpec, manager: PoolManager) -> TierMaker | None:
        """The remote tier of a pool with a host tier. The server is not asked yet."""
        if self._remote is None:
            return None
        store, rules = self._remote(spec), self._rules("remote", _MOST_ASKED)
        return TierMaker(manager.add_remote(store.name_key, rules), store, self._now, lambda: None)

    def _rules(self, name: str, most_asked: int) -> TierRules:
        """By the settings of the tier of this name."""
        config = self._config
        admit, deadline, tenants = (getattr(config, f"{name}_{what}") for what in ("admit", "deadline", "tenants"))
        return TierRules(
            on_second_use=admit == "second-use",
            deadline=deadline,
            most_asked=most_asked,
            name=name,
            weighs=config.tier_worth == "auto",
            tenants=frozenset(tenants) or None,
        )
