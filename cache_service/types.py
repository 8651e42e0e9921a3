"""Values that cross the edges of the pure core.

Owns: ids, what a pool is made of, the columns of a step and of its reply. Everything here is frozen; arrays are not
copied, so whoever hands one over does not write to it again. Knows nothing of protobuf.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

SequenceId = NewType("SequenceId", int)  # chosen by a client, 1 to MAX_ID, unique within its session
BlockId = NewType("BlockId", int)  # index of a block in its pool; NULL_BLOCK is never allocated
SessionId = NewType("SessionId", str)  # 128 random bits in hex

NULL_BLOCK = BlockId(0)
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


class StartResult(IntEnum):
    """Answer to one start. The numbers are the protocol's."""

    STARTED = 1
    LOADING = 2
    COMPUTING = 3
    NO_ROOM = 4


class ItemResult(IntEnum):
    """Answer to one fork. The numbers are the protocol's."""

    OK = 1
    NO_ROOM = 2


class PressureLevel(IntEnum):
    """How full a pool is, by blocks neither free nor evictable. The numbers are the protocol's."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


class BlockState(Enum):
    """Every block is in exactly one of these (rule R1)."""

    NULL = "null"
    FREE = "free"
    CACHED = "cached"  # indexed, in no table, evictable now
    REFERENCED = "referenced"
    FENCED = "fenced"  # in no table, but a step in flight may touch it
    QUARANTINED = "quarantined"  # a session that ended may still write to it


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Sizes of one pool. num_blocks counts the null block."""

    num_blocks: int
    block_size: int
    max_sequences: int = 256
    max_tokens_per_sequence: int = 4096
    watermark: float = 0.01  # share of the blocks kept free when admitting while something runs
    eviction_policy: str = "lru"
    prefix_caching: bool = True

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def limit_tokens(self) -> int:
        """Most tokens that one sequence can ever have here."""
        return min(self.max_tokens_per_sequence, self.num_usable_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class SequenceArgs:
    """What CreateSequence fixes for the life of a sequence."""

    sequence_id: SequenceId
    token_ids: Int32Array
    max_tokens: int = 0  # 0: the pool's limit
    tenant: str = ""
    priority: int = 0


NO_INT32: Int32Array = np.empty(0, np.int32)
NO_INT64: Int64Array = np.empty(0, np.int64)
NO_INT32.flags.writeable = NO_INT64.flags.writeable = False


class StepBatch(NamedTuple):
    """The items of one Step as columns; fields and order are those of the protocol's StepRequest.

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


@dataclass(frozen=True, slots=True)
class Copies:
    """Block copies to be run in order, before anything that the same call allows is written."""

    sources: Int32Array
    destinations: Int32Array


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
    block_table: Int32Array


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
    num_evicted_blocks: int
    num_forks: int
    num_copies_on_write: int
    num_adopted_blocks: int
    num_steps: int
    num_refusals: int
    revision: int
    pressure: PressureLevel
    num_sessions: int
