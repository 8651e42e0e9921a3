"""What callers are shown of a pool: sequences, blocks, admission and counts."""

from dataclasses import dataclass
from typing import NamedTuple

from .sequence_args import Retention
from .types import BlockState, Int32Array, PressureLevel, ReuseHint, SequenceId, SequenceState, SessionId


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence as callers see it. num_accesses counts the steps that named it."""

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
    reuse_hint: ReuseHint = ReuseHint.UNSPECIFIED
    idle_seconds: float = 0.0
    group_tables: tuple[Int32Array, ...] = ()  # of the groups of layers behind the first; NULL_BLOCK behind their windows


class Readable(NamedTuple):
    """A sequence, and its first num_tokens, whose K and V may be read.

    These are the committed tokens; fewer where an engine has to copy later ones and may not have done so yet.
    """

    view: SequenceView
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block as callers see it: its state, and the number of its holders of each kind."""

    state: BlockState
    num_references: int
    num_fences: int
    num_transfers: int
    num_quarantines: int
    indexed: bool
    has_host_copy: bool
    reuse_hint: ReuseHint = ReuseHint.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer of check_admission: NEVER where can_ever is False, else LATER where can_now is False."""

    can_now: bool
    can_ever: bool
    num_hit_tokens: int
    num_required_blocks: int
    num_available_blocks: int
    limit_tokens: int


class GroupStats(NamedTuple):
    """What the tables of running sequences have in one group of layers: entries with a block, and those left behind."""

    window_tokens: int  # 0: the group reads all tokens
    num_held_entries: int
    num_passed_entries: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of one pool, derived from its state, and sums over its life. The names are the protocol's."""

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
    num_claimed_blocks: int = 0
    num_pressure_changes: int = 0
    num_collected_blocks: int = 0
    num_hand_offs: int = 0
    num_no_reuse_blocks: int = 0
    num_soon_blocks: int = 0
    num_free_disk_blocks: int = 0
    num_cached_disk_blocks: int = 0
    num_busy_disk_blocks: int = 0
    num_queued_disk_blocks: int = 0
    num_disk_loads: int = 0
    num_late_disk_loads: int = 0
    num_disk_hit_blocks: int = 0
    num_disk_stored_blocks: int = 0
    num_evicted_disk_blocks: int = 0
    num_damaged_disk_blocks: int = 0
    num_failed_disk_blocks: int = 0
    num_disk_rests: int = 0
    num_queued_remote_blocks: int = 0
    num_remote_loads: int = 0
    num_late_remote_loads: int = 0
    num_remote_hit_blocks: int = 0
    num_remote_stored_blocks: int = 0
    num_damaged_remote_blocks: int = 0
    num_failed_remote_blocks: int = 0
    num_remote_rests: int = 0
    num_unworthy_disk_loads: int = 0
    num_unworthy_remote_loads: int = 0
    disk_first_byte_seconds: float = 0.0
    remote_first_byte_seconds: float = 0.0
    disk_break_even_tokens: int = 0
    remote_break_even_tokens: int = 0
    prefill_rate_tokens: int = 0
    recent_hit_rate: float = 0.0
    reachable_hit_rate: float = 0.0
    num_recent_distinct_blocks: int = 0
