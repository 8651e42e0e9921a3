"""One pool: the facade of the pure core.

Owns how the parts of a pool are put together; each method forwards to the part that has it. A caller publishes what is pending
before it asks or calls where the answer is to show it. Knows no grpc, asyncio, torch or clock: `tick` tells the time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from .calls.admission import AdmissionCalls
from .calls.clear import Clearing, ClearResult
from .calls.create import CreateCalls
from .calls.evict import Demotion, EvictionCalls
from .calls.garbage import Garbage, GarbageCalls
from .calls.hand_off import HandOffCalls
from .calls.maintenance import Maintenance
from .calls.prefix import PinResult, PrefixCalls
from .calls.reclaim import Reclaim
from .calls.restore import RestoreResult, restore
from .calls.sessions import CloseResult, SessionCalls
from .calls.update import SequenceUpdates
from .calls.victims import VictimCalls, Victims
from .index.below_blocks import TierBlocks
from .index.index_record import Unwritten
from .inspection.explain import Explanation
from .inspection.prefix_match import PrefixMatch
from .inspection.queries import Queries
from .pool_state import PoolState
from .sequences.claims import StartNumbers
from .sequences.publisher import ALL_BLOCKS
from .step.apply import StepApplier
from .step.one_item import OneItemCalls
from .tables.inflight_prefix import InflightPrefixes
from .tables.lifecycle import SequenceLifecycle
from .tables.prefix_lookup import PrefixLookup
from .tables.prompt_watch import PromptWatch
from .tables.reserve import Reservations
from .tables.start import SequenceStarter
from .tiers.below.named_tier import NamedTier
from .tiers.below.slot_table import SlotTable
from .tiers.below.tier_chain import TierChain
from .tiers.below.tier_orders import Table, TierRules
from .tiers.below.told_table import ToldTable
from .tiers.below.worth import TierWorth
from .tiers.offload import Offloader
from .tiers.sequence_swap import SequenceSwapper
from .values.copies import Copies, StoredBlock
from .values.kept_index import Digest, KeptIndex, UInt64Array, Verification
from .values.pool_config import PoolConfig
from .values.sequence_args import Retention, SequenceArgs
from .values.step_columns import StepBatch, StepReply
from .values.types import (
    NO_INT64,
    BlockId,
    BlockState,
    Executor,
    Int32Array,
    Int64Array,
    PressureLevel,
    ReuseHint,
    SessionId,
    Tier,
)
from .values.views import Admission, BlockView, GroupStats, PoolStats, Readable, SequenceView


class PoolManager:
    """Everything that can be asked of one pool. The parts raise the errors that their own methods name."""

    def __init__(self, config: PoolConfig, start_numbers: StartNumbers | None = None, spec_key: bytes = b"") -> None:
        """start_numbers: of the whole service; a pool alone has its own. spec_key: KvSpec.key, for the names of blocks.

        Raises InvalidField for a config that cannot work.
        """
        state = self.state = PoolState(config, start_numbers, spec_key)
        swapper = self.swapper = _add_host_tier(state) if config.num_host_blocks else None
        lookup = PrefixLookup(state, swapper.host if swapper is not None else None)
        lifecycle, reservations = SequenceLifecycle(state, swapper), Reservations(state)
        prompts = self._prompts = PromptWatch(state)
        starter = SequenceStarter(state, lookup, reservations, swapper, prompts)
        self.reclaim = Reclaim(state, lifecycle, swapper)
        inflight = InflightPrefixes(state, lookup)
        self._steps = StepApplier(state, lifecycle, reservations, starter, inflight, swapper, prompts)
        self._one_item = OneItemCalls(state, self._steps, lookup, reservations, swapper)
        self._create = CreateCalls(state, lookup, self.reclaim)
        self._updates = SequenceUpdates(state)
        self._hand_offs = HandOffCalls(state)
        self._prefixes = PrefixCalls(state)
        self._evictions = EvictionCalls(state, swapper)
        self._victims = VictimCalls(state)
        self._admission = AdmissionCalls(state, lookup)
        self._maintenance = Maintenance(state, swapper)
        self._garbage = GarbageCalls(state, self._maintenance, swapper)
        self._sessions = SessionCalls(state, self.reclaim, swapper)
        self._queries = Queries(state, lookup, swapper, prompts)
        self.disk: NamedTier | None = None
        self.remote: NamedTier | None = None
        self._below = TierChain(state)

    @property
    def config(self) -> PoolConfig:
        return self.state.config

    # Time, and what the pool does by itself

    @property
    def now(self) -> float:
        return self.state.now

    def tick(self, now: float) -> None:
        """It is this late: told before each call, in seconds of a monotone clock."""
        self.state.tick(now)

    def do_due_work(self) -> bool:
        return self._maintenance.do_due_work()

    def publish_pending(self, max_blocks: int | None = None) -> bool:
        return self._maintenance.publish_pending(max_blocks)

    def end_some_transfers(self, max_orders: int) -> bool:
        return self._maintenance.end_reported_orders(max_orders)

    def reclaim_some(self, max_blocks: int) -> bool:
        return self._sessions.reclaim_blocks(max_blocks)

    # Tiers below the host tier, added before any other call, the disk first

    def add_disk(
        self,
        key: bytes,
        num_slots: int,
        era: int,
        stored: Sequence[StoredBlock] = (),
        rules: TierRules | None = None,
        eviction_policy: str = "lru",
    ) -> NamedTier:
        """A tier on a disk of this pool alone. stored: what earlier runs have left under this key in this era."""
        table = SlotTable(self._add_blocks(Tier.DISK), num_slots, stored, eviction_policy)
        self.disk = self._add_tier(key, table, era, rules, Tier.DISK)
        return self.disk

    def add_remote(self, key: bytes, rules: TierRules) -> NamedTier:
        """A tier in a store that other pools of the same key share."""
        self.remote = self._add_tier(key, ToldTable(self._add_blocks(Tier.REMOTE)), 0, rules, Tier.REMOTE)
        return self.remote

    def _add_blocks(self, tier: Tier) -> TierBlocks:
        blocks = TierBlocks(tier, self.state.index)
        self.state.below_blocks.tiers.append(blocks)
        return blocks

    def _add_tier(self, key: bytes, table: Table, era: int, rules: TierRules | None, which: Tier) -> NamedTier:
        assert self.swapper is not None, "such a tier lies behind a host tier"
        if self.state.below is None:
            self.state.below = self._below
        rules = rules or TierRules()
        self._prompts.is_on = True
        worth = TierWorth(self._prompts.seconds, self.config.block_size, is_on=rules.weighs)
        tier = NamedTier(self.state, self.swapper.offloader, key, table, era, rules, worth, which)
        self._below.tiers.append(tier)
        return tier

    # A kept index

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

    def write_record(self, max_blocks: int, digest: Digest | None = None) -> bool:
        return self.state.index.write_record(max_blocks, digest)

    def take_record(self, max_blocks: int) -> Unwritten:
        return self.state.index.take_unwritten(max_blocks)

    def write_taken(self, taken: Unwritten, digests: UInt64Array) -> bool:
        return self.state.index.write_taken(taken, digests)

    # Sessions

    def open_session(self, session: SessionId, executor: Executor, caller: str = "") -> None:
        self._sessions.open_session(session, executor, caller)

    def close_session(self, session: SessionId, *, may_still_write: bool) -> CloseResult:
        return self._sessions.close_session(session, may_still_write=may_still_write)

    def end_quarantine(self, session: SessionId) -> int:
        return self._sessions.end_quarantine(session)

    def reclaim_hint(self, session: SessionId) -> int:
        return self._sessions.reclaim_hint(session)

    # Steps

    def step(self, session: SessionId, batch: StepBatch) -> StepReply:
        return self._steps.step(session, batch)

    def complete(
        self,
        session: SessionId,
        completed_step_id: int,
        completed_transfers: Int64Array = NO_INT64,
        failed_transfers: Int64Array = NO_INT64,
    ) -> None:
        self._steps.complete(session, completed_step_id, completed_transfers, failed_transfers)

    # Sequences, one call each

    def offer_sequence(self, session: SessionId, sequence_id: int, offer: bytes) -> bytes:
        return self._hand_offs.offer(session, sequence_id, offer)

    def withdraw_offer(self, session: SessionId, sequence_id: int) -> None:
        self._hand_offs.withdraw(session, sequence_id)

    def take_sequence(self, session: SessionId, offer: bytes, sequence_id: int) -> None:
        self._hand_offs.take(session, offer, sequence_id)

    def create_sequence(self, session: SessionId, args: SequenceArgs) -> int:
        return self._create.create_sequence(session, args)

    def extend(self, session: SessionId, sequence_id: int, num_tokens: int, *, look_up: bool) -> Copies:
        return self._one_item.extend(session, sequence_id, num_tokens, look_up=look_up)

    def commit(
        self, session: SessionId, sequence_id: int, num_tokens: int, first_token_idx: int, token_ids: Int32Array
    ) -> None:
        self._one_item.commit(session, sequence_id, num_tokens, first_token_idx, token_ids)

    def fork(self, session: SessionId, parent_id: int, child_id: int, num_tokens: int | None) -> None:
        self._one_item.fork(session, parent_id, child_id, num_tokens)

    def truncate(self, session: SessionId, sequence_id: int, num_tokens: int) -> None:
        self._one_item.truncate(session, sequence_id, num_tokens)

    def release(self, session: SessionId, sequence_id: int) -> int:
        return self._one_item.release(session, sequence_id)

    def swap_out(self, session: SessionId, sequence_id: int) -> Copies:
        return self._one_item.swap_out(session, sequence_id)

    def swap_in(self, session: SessionId, sequence_id: int) -> Copies:
        return self._one_item.swap_in(session, sequence_id)

    def update_sequence(
        self,
        session: SessionId,
        sequence_id: int,
        *,
        priority: int | None = None,
        retention: Retention | None = None,
        reuse_hint: ReuseHint | None = None,
    ) -> None:
        self._updates.update_sequence(session, sequence_id, priority=priority, retention=retention, reuse_hint=reuse_hint)

    def note_read(self, session: SessionId, sequence_id: int) -> None:
        self._updates.note_read(session, sequence_id)

    # Cached prefixes

    def pin_prefix(self, session: SessionId, pin_id: str, tenant: str, token_ids: Int32Array, ttl: float) -> PinResult:
        return self._prefixes.pin_prefix(session, pin_id, tenant, token_ids, ttl)

    def unpin_prefix(self, session: SessionId, pin_id: str) -> None:
        self._prefixes.unpin_prefix(session, pin_id)

    def store_logits(self, session: SessionId, sequence_id: int, num_tokens: int, logits: bytes) -> None:
        self._prefixes.store_logits(session, sequence_id, num_tokens, logits)

    def read_logits(self, session: SessionId, sequence_id: int) -> bytes:
        return self._prefixes.read_logits(session, sequence_id)

    def begin_clearing(self) -> Clearing:
        """Forgets every cached block, slice by slice; blocks in use lose their index entry, and pins end."""
        return Clearing(self.state)

    def clear_prefix_cache(self) -> ClearResult:
        """The same in one go."""
        clearing = self.begin_clearing()
        while clearing.clear_some():
            pass
        return clearing.end()

    # Room

    def evict_blocks(self, num_free_blocks: int, at_most: int = ALL_BLOCKS) -> int:
        return self._evictions.evict_blocks(num_free_blocks, at_most)

    def evict_count(self, num_blocks: int) -> int:
        return self._evictions.evict_count(num_blocks)

    def evict_to(self, max_utilization: float, at_most: int = ALL_BLOCKS) -> int:
        return self._evictions.evict_to(max_utilization, at_most)

    def evict_excess(self, max_blocks: int) -> int:
        return self._evictions.evict_excess(max_blocks)

    def evict_ahead(self, max_blocks: int) -> int:
        return self._evictions.evict_ahead(max_blocks)

    def demoting(self, session: SessionId) -> AbstractContextManager[Demotion]:
        return self._evictions.demoting(session)

    def select_victims(self, session: SessionId, policy: str, num_blocks: int, max_utilization: float | None = None) -> Victims:
        return self._victims.select_victims(session, policy, num_blocks, max_utilization)

    def collect_garbage(self, session: SessionId) -> Garbage:
        return self._garbage.collect_garbage(session)

    def check_admission(
        self,
        tenant: str,
        token_ids: Int32Array | None,
        num_prompt_tokens: int,
        num_new_tokens: int,
        retention: Retention | None = None,
        session: SessionId | None = None,
    ) -> Admission:
        return self._admission.check_admission(tenant, token_ids, num_prompt_tokens, num_new_tokens, retention, session)

    # Questions

    def view(self, session: SessionId, sequence_id: int, *, with_table: bool = True) -> SequenceView:
        return self._queries.view(session, sequence_id, with_table=with_table)

    def sequence_ids(self, session: SessionId) -> Int64Array:
        return self._queries.sequence_ids(session)

    def sequence_ids_of(self, session: SessionId, tenant: str) -> Int64Array:
        return self._queries.sequence_ids_of(session, tenant)

    def check_tenant(self, session: SessionId, sequence_id: int, tenant: str) -> None:
        self._queries.check_tenant(session, sequence_id, tenant)

    def num_sequences(self, session: SessionId | None) -> int:
        return self._queries.num_sequences(session)

    def start_number(self, session: SessionId, sequence_id: int) -> int:
        return self._queries.start_number(session, sequence_id)

    def tokens(self, session: SessionId, sequence_id: int) -> Int32Array:
        return self._queries.tokens(session, sequence_id)

    def readable(self, session: SessionId, sequence_id: int) -> Readable:
        return self._queries.readable(session, sequence_id)

    def writable_slots(self, session: SessionId, sequence_id: int) -> tuple[int, int]:
        return self._queries.writable_slots(session, sequence_id)

    def match_prefix(self, tenant: str, token_ids: Int32Array) -> PrefixMatch:
        return self._queries.match_prefix(tenant, token_ids)

    def explain_match(self, tenant: str, token_ids: Int32Array) -> Explanation:
        return self._queries.explain_match(tenant, token_ids)

    def block_view(self, block: int) -> BlockView:
        return self._queries.block_view(block)

    def block_state(self, block: BlockId) -> BlockState:
        return self.state.pool.state(block)

    def stats(self) -> PoolStats:
        return self._queries.stats()

    def group_stats(self) -> list[GroupStats]:
        return self._queries.group_stats()

    @property
    def pressure(self) -> PressureLevel:
        return self.state.gauge.level

    def audit(self) -> Iterator[list[str]]:
        return self._queries.audit()

    def check_invariants(self) -> list[str]:
        """The whole audit in one go; empty when all invariants hold."""
        return [text for wrong in self.audit() for text in wrong]


def _add_host_tier(state: PoolState) -> SequenceSwapper:
    offloader = Offloader(state)
    state.lower_tier = offloader
    return SequenceSwapper(state, offloader)
