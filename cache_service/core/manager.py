"""One pool: the parts of the pure core, put together.

Callers use the parts: `manager.steps.step(...)`, `manager.prefixes.pin(...)`, `manager.queries.view(...)`. The time is set
before each call, in seconds of a monotone clock, by `manager.state.tick`. A caller publishes what is pending (`maintenance`)
before it asks or calls where the answer is to show it. Knows no grpc, asyncio, torch or clock.
"""

from collections.abc import Callable, Sequence

from .calls.admission import AdmissionCalls
from .calls.create import CreateCalls
from .calls.evict import EvictionCalls
from .calls.garbage import GarbageCalls
from .calls.hand_off import HandOffCalls
from .calls.maintenance import Maintenance
from .calls.prefix import PrefixCalls
from .calls.reclaim import Reclaim
from .calls.restore import RestoreResult, restore
from .calls.sessions import SessionCalls
from .calls.update import SequenceUpdates
from .calls.victims import VictimCalls
from .index.below_blocks import TierBlocks
from .index.index_record import IndexRecord
from .inspection.queries import Queries
from .pool_state import PoolState
from .sequences.claims import StartNumbers
from .step.apply import StepApplier
from .step.one_item import OneItemCalls
from .tables.inflight_prefix import InflightPrefixes
from .tables.lifecycle import SequenceLifecycle
from .tables.missed import MissedTokens
from .tables.prefix_lookup import PrefixLookup
from .tables.prompt_watch import PromptWatch
from .tables.reserve import Reservations
from .tables.start import SequenceStarter
from .tiers.content_tier import ContentTier, TierChain
from .tiers.directory import Directory, RemoteDirectory, SlotDirectory
from .tiers.offload import Offloader
from .tiers.orders import TierRules
from .tiers.sequence_swap import SequenceSwapper
from .tiers.worth import TierWorth
from .values.copies import StoredBlock
from .values.kept_index import KeptIndex, Verification
from .values.pool_config import PoolConfig
from .values.types import Tier


class PoolManager:
    """Everything that can be asked of one pool, by its parts."""

    def __init__(self, config: PoolConfig, start_numbers: StartNumbers | None = None, spec_key: bytes = b"") -> None:
        """start_numbers: of the whole service; a pool alone has its own. spec_key: KvSpec.key, for the names of blocks.

        Raises InvalidField for a config that cannot work.
        """
        state = self.state = PoolState(config, start_numbers, spec_key)
        swapper = self.swapper = _add_host_tier(state) if config.num_host_blocks else None
        lookup = PrefixLookup(state, swapper.host if swapper is not None else None)
        lifecycle, reservations = SequenceLifecycle(state, swapper), Reservations(state)
        prompts = self._prompts = PromptWatch(state)
        starter = SequenceStarter(state, lookup, reservations, swapper, prompts, MissedTokens(state, lookup))
        self.reclaim = Reclaim(state, lifecycle, swapper)
        inflight = InflightPrefixes(state, lookup)
        self.steps = StepApplier(state, lifecycle, reservations, starter, inflight, swapper, prompts)
        self.one_item = OneItemCalls(state, self.steps, lookup, reservations, swapper)
        self.creation = CreateCalls(state, lookup, self.reclaim)
        self.updates = SequenceUpdates(state)
        self.hand_offs = HandOffCalls(state)
        self.prefixes = PrefixCalls(state)
        self.evictions = EvictionCalls(state, swapper)
        self.victims = VictimCalls(state)
        self.admission = AdmissionCalls(state, lookup)
        self.maintenance = Maintenance(state, swapper)
        self.garbage = GarbageCalls(state, self.maintenance, swapper)
        self.sessions = SessionCalls(state, self.reclaim, swapper)
        self.queries = Queries(state, lookup, swapper, prompts)
        self.disk: ContentTier | None = None
        self.remote: ContentTier | None = None
        self._below = TierChain(state)

    # Tiers below the host tier, added before any other call, the disk first

    def add_disk(
        self,
        key: bytes,
        num_slots: int,
        era: int,
        stored: Sequence[StoredBlock] = (),
        rules: TierRules | None = None,
    ) -> ContentTier:
        """A tier on a disk of this pool alone. stored: what earlier runs have left under this key in this era."""
        directory = SlotDirectory(self._add_blocks(Tier.DISK), num_slots, stored)
        self.disk = self._add_tier(key, directory, era, rules, Tier.DISK)
        return self.disk

    def add_remote(self, key: bytes, rules: TierRules) -> ContentTier:
        """A tier in a store that other pools of the same key share."""
        self.remote = self._add_tier(key, RemoteDirectory(self._add_blocks(Tier.REMOTE)), 0, rules, Tier.REMOTE)
        return self.remote

    def _add_blocks(self, tier: Tier) -> TierBlocks:
        blocks = TierBlocks(tier, self.state.index)
        self.state.below_blocks.tiers.append(blocks)
        return blocks

    def _add_tier(self, key: bytes, directory: Directory, era: int, rules: TierRules | None, which: Tier) -> ContentTier:
        assert self.swapper is not None, "such a tier lies behind a host tier"
        if self.state.below is None:
            self.state.below = self._below
        rules = rules or TierRules()
        self._prompts.is_on = True
        worth = TierWorth(self._prompts.seconds, self.state.config.block_size, is_on=rules.weighs)
        tier = ContentTier(self.state, self.swapper.offloader, key, directory, era, rules, worth, which)
        self._below.tiers.append(tier)
        return tier

    # A kept index

    @property
    def record(self) -> IndexRecord:
        """What the pool's kept index lacks; after `restore`."""
        assert self.state.index.record is not None, "a pool whose index is not kept"
        return self.state.index.record

    def restore(
        self,
        kept: KeptIndex,
        *,
        may_still_write: bool,
        on_behind: Callable[[], None] = lambda: None,
        verification: Verification | None = None,
    ) -> RestoreResult:
        """Before any other call."""
        hosts = self.swapper.host if self.swapper is not None else None
        return restore(self.state, hosts, kept, may_still_write=may_still_write, on_behind=on_behind, verification=verification)


def _add_host_tier(state: PoolState) -> SequenceSwapper:
    offloader = Offloader(state)
    state.lower_tier = offloader
    return SequenceSwapper(state, offloader)
