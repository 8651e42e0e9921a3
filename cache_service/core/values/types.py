"""Values that cross the edges of the pure core.

Owns: ids, what a pool is made of, the columns of a step and of its reply. Everything here is frozen; arrays are not
copied, so whoever hands one over does not write to it again. Knows nothing of protobuf.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

SequenceId = NewType("SequenceId", int)  # chosen by a client, 1 to MAX_ID, unique within its session
BlockId = NewType("BlockId", int)  # index of a block in its pool; NULL_BLOCK is never allocated
SessionId = NewType("SessionId", str)  # 128 random bits in hex

NULL_BLOCK = BlockId(0)
UNKNOWN_ROOT = 1  # of a block that may still hold anybody's tokens; roots of tenants are negative, 0 is a block never used
MAX_ID = 2**53 - 1

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Executor(Enum):
    """Who executes copies and transfer orders."""

    CACHE = "cache"
    ENGINE = "engine"


class SequenceState(IntEnum):
    """Where a sequence is in its life. The numbers are the protocol's; FREE_SLOT never leaves the core."""

    FREE_SLOT = 0
    WAITING = 1
    RUNNING = 2
    LOADING = 3
    SWAPPED = 4


class StartResult(IntEnum):
    """Answer to one start. The numbers are the protocol's."""

    STARTED = 1
    LOADING = 2
    COMPUTING = 3
    NO_ROOM = 4


class ItemResult(IntEnum):
    """Answer to one fork, swap-out or swap-in. The numbers are the protocol's."""

    OK = 1
    NO_ROOM = 2


class TransferKind(IntEnum):
    """Direction of a transfer order. The numbers are the protocol's."""

    SWAP_OUT = 1  # device block to host block
    SWAP_IN = 2  # host block to device block


class PressureLevel(IntEnum):
    """How full a pool is, by blocks neither free nor evictable. The numbers are the protocol's."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


class MatchEnd(IntEnum):
    """Why a match stops where it stops. The numbers are the protocol's."""

    COMPLETE = 1
    PARTIAL_BLOCK = 2
    NEVER_STORED = 3
    EVICTED = 4
    EXPIRED = 5
    CLEARED = 6
    COMPUTING = 7
    BELOW_MINIMUM = 8
    CACHING_OFF = 9


class Tier(IntEnum):
    """Where a cached block's bytes are. The numbers are the protocol's."""

    DEVICE = 1
    HOST = 2  # only there


class EventKind(IntEnum):
    """What an event of a watch tells. The numbers are the protocol's."""

    SNAPSHOT = 1
    SNAPSHOT_END = 2
    STORED = 3
    REMOVED = 4
    TIER_CHANGED = 5
    PRESSURE = 6
    POOL_REPLACED = 7


class BlockState(Enum):
    """Every block is in exactly one of these (rule R1)."""

    NULL = "null"
    FREE = "free"
    CACHED = "cached"  # indexed, in no table, evictable now
    REFERENCED = "referenced"
    FENCED = "fenced"  # in no table, but a step in flight may touch it
    IN_TRANSFER = "in_transfer"  # in no table, an end of a transfer order in flight
    QUARANTINED = "quarantined"  # a session that ended may still write to it


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Sizes and rules of one pool. num_blocks and num_host_blocks count the null block of their tier."""

    num_blocks: int
    block_size: int
    max_sequences: int = 256
    max_tokens_per_sequence: int = 4096
    watermark: float = 0.01  # share of the blocks kept free when admitting while something runs
    eviction_policy: str = "adaptive"
    prefix_caching: bool = True
    num_host_blocks: int = 0  # 0: no host tier
    evict_above: float = 1.0  # share of the pool; held and cached blocks above it are evicted before they are needed
    pressure_levels: tuple[float, ...] = (0.6, 0.8, 0.95)  # where medium, high and critical begin
    prefix_ttl: float | None = None  # seconds that a cached block lives without being used
    min_prefix_tokens: int = 0  # a shorter match is no hit
    max_cached_blocks: int | None = None  # most blocks that are cached and held by nobody
    tenant_quota: float = 1.0  # share of the pool that one tenant may keep cached, 0 to 0.5; 1 is no quota
    tenant_quotas: tuple[tuple[str, float], ...] = ()  # of tenants that have another one
    logits_memory: int = 0  # bytes of stored logits; 0 stores none

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def limit_tokens(self) -> int:
        """Most tokens that one sequence can ever have here."""
        return min(self.max_tokens_per_sequence, self.num_usable_blocks * self.block_size)

    def limit_with(self, retention: "Retention | None") -> int:
        """The same for a sequence that gives blocks back: what it holds at once has to fit, not all that it ever held."""
        fits = retention is not None and retention.num_held_blocks(self.block_size) <= self.num_usable_blocks
        return self.max_tokens_per_sequence if fits else self.limit_tokens


@dataclass(frozen=True, slots=True)
class Retention:
    """The first num_sink_tokens and the last num_window_tokens committed ones stay readable (retention.py)."""

    num_sink_tokens: int
    num_window_tokens: int

    def num_held_blocks(self, block_size: int) -> int:
        """Most blocks that a sequence holds which grows by one token at a time."""
        return -(-self.num_sink_tokens // block_size) + (self.num_window_tokens - 1) // block_size + 2


@dataclass(frozen=True, slots=True)
class SequenceArgs:
    """What CreateSequence fixes for the life of a sequence."""

    sequence_id: SequenceId
    token_ids: Int32Array
    max_tokens: int = 0  # 0: the pool's limit
    tenant: str = ""
    priority: int = 0
    retention: Retention | None = None
    start_number: int = 0  # 0: the next one


NO_INT32: Int32Array = np.empty(0, np.int32)
NO_INT64: Int64Array = np.empty(0, np.int64)
NO_INT32.flags.writeable = NO_INT64.flags.writeable = False


class StepBatch(NamedTuple):
    """The items of one Step as columns; fields are those of the protocol's StepRequest.

    A named tuple, as is the reply: a frozen dataclass of so many fields takes four times as long to make.
    """

    step_id: int
    completed_step_id: int
    commit_ids: Int64Array = NO_INT64
    commit_lens: Int32Array = NO_INT32  # absolute
    commit_num_new: Int32Array = NO_INT32
    commit_tokens: Int32Array = NO_INT32  # concatenated
    fork_parents: Int64Array = NO_INT64
    fork_children: Int64Array = NO_INT64
    fork_lens: Int32Array = NO_INT32
    truncate_ids: Int64Array = NO_INT64
    truncate_lens: Int32Array = NO_INT32
    release_ids: Int64Array = NO_INT64
    start_ids: Int64Array = NO_INT64
    start_max_new: Int32Array = NO_INT32
    start_max_hit: Int32Array = NO_INT32
    reserve_ids: Int64Array = NO_INT64
    reserve_min: Int32Array = NO_INT32
    reserve_max: Int32Array = NO_INT32
    completed_transfers: Int64Array = NO_INT64
    failed_transfers: Int64Array = NO_INT64
    swap_out_ids: Int64Array = NO_INT64
    swap_in_ids: Int64Array = NO_INT64
    start_may_wait: Int32Array = NO_INT32  # empty: nobody may


class StepReply(NamedTuple):
    """What a Step answers, as columns; fields are those of the protocol's StepResponse."""

    fork_results: Int32Array
    start_results: Int32Array
    start_hits: Int32Array
    start_reserved: Int32Array
    start_num_blocks: Int32Array
    start_block_ids: Int32Array
    reserve_reserved: Int32Array
    new_block_item_idx: Int32Array
    new_block_ids: Int32Array
    update_ids: Int64Array
    update_table_idx: Int32Array
    update_block_ids: Int32Array
    copy_sources: Int32Array
    copy_destinations: Int32Array
    num_free: int
    num_evictable: int
    num_fenced: int
    pressure: PressureLevel
    revision: int
    num_give_back: int = 0
    start_has_logits: Int32Array = NO_INT32  # empty: no start has
    swap_out_results: Int32Array = NO_INT32
    swap_in_results: Int32Array = NO_INT32
    transfer_ids: Int64Array = NO_INT64
    transfer_kinds: Int32Array = NO_INT32
    transfer_sources: Int32Array = NO_INT32
    transfer_destinations: Int32Array = NO_INT32
    ready_ids: Int64Array = NO_INT64
    ready_hits: Int32Array = NO_INT32
    ready_reserved: Int32Array = NO_INT32
    ready_num_blocks: Int32Array = NO_INT32
    ready_block_ids: Int32Array = NO_INT32


@dataclass(frozen=True, slots=True)
class Copies:
    """Transfers, then block copies, to be run in order before anything that the same call allows is written."""

    sources: Int32Array
    destinations: Int32Array
    transfer_kinds: Int32Array = field(default_factory=lambda: NO_INT32)
    transfer_sources: Int32Array = field(default_factory=lambda: NO_INT32)
    transfer_destinations: Int32Array = field(default_factory=lambda: NO_INT32)

    def __len__(self) -> int:
        """Blocks to be copied."""
        return len(self.sources) + len(self.transfer_kinds)


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence as people see it. num_accesses counts the steps that named it."""

    sequence_id: SequenceId
    session_id: SessionId
    state: SequenceState
    num_tokens: int
    num_committed_tokens: int
    num_reserved_tokens: int
    max_tokens: int
    priority: int
    num_hit_tokens: int
    num_accesses: int
    block_table: Int32Array  # NULL_BLOCK for a hole of retention
    retention: Retention | None = None
    num_host_blocks: int = 0
    start_number: int = 0
    idle_seconds: float = 0.0


class Readable(NamedTuple):
    """A sequence whose K and V may be read: those of its first num_tokens.

    As many as are committed; fewer where an engine was told to copy what comes then, and may not have done so yet.
    """

    view: SequenceView
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block as people see it: its state, and who holds it in numbers."""

    state: BlockState
    num_references: int
    num_fences: int
    num_transfers: int
    num_quarantines: int
    indexed: bool
    has_host_copy: bool


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer of check_admission. can_ever False is NEVER, can_now False is LATER."""

    can_now: bool
    can_ever: bool
    num_hit_tokens: int
    num_required_blocks: int
    num_available_blocks: int
    limit_tokens: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of one pool, derived from its state, and sums over its life; names are the protocol's."""

    num_free_blocks: int
    num_cached_blocks: int
    num_referenced_blocks: int
    num_fenced_blocks: int
    num_quarantined_blocks: int
    num_indexed_blocks: int
    peak_used_blocks: int
    num_shared_blocks: int
    num_waiting_sequences: int
    num_running_sequences: int
    slot_utilization: float
    num_starts: int
    num_look_ups: int
    num_hits: int
    num_look_up_tokens: int
    num_hit_tokens: int
    num_full_hits: int
    num_evicted_blocks: int
    num_forks: int
    num_copies_on_write: int
    num_adopted_blocks: int
    num_retention_dropped_blocks: int
    num_steps: int
    num_refusals: int
    revision: int
    pressure: PressureLevel
    num_sessions: int
    num_misses: int
    hit_rate: float
    block_utilization: float
    num_pins: int
    num_pinned_blocks: int
    num_expired_blocks: int
    num_cleared_blocks: int
    num_tenants: int
    num_quota_evictions: int
    num_stored_logits: int
    num_transfer_blocks: int = 0
    num_loading_sequences: int = 0
    num_swapped_sequences: int = 0
    num_free_host_blocks: int = 0
    num_cached_host_blocks: int = 0
    num_held_host_blocks: int = 0
    num_busy_host_blocks: int = 0
    num_swap_outs: int = 0
    num_swap_ins: int = 0
    num_demoted_blocks: int = 0
    num_promoted_blocks: int = 0
    num_evicted_host_blocks: int = 0
    num_transfers: int = 0
    num_failed_transfers: int = 0
    num_refused_starts: int = 0
    num_computing_answers: int = 0
    num_owed_blocks: int = 0
    num_pressure_changes: int = 0
    num_collected_blocks: int = 0
