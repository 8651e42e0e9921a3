"""What callers are shown of a pool: sequences, blocks, admission and counts."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from .sequence_args import Retention
from .types import BlockState, EvictionNeed, Int32Array, MatchEnd, ReuseHint, SequenceId, SequenceState, SessionId


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


class Miss(NamedTuple):
    """Tokens that were looked up and not found, of one cause, as the protocol has it."""

    tenant: str
    cause: MatchEnd
    need: EvictionNeed
    evicted_for: str
    within_turnovers: float
    num_tokens: int


class CurvePoint(NamedTuple):
    """The hit rate over the last hour of a pool of so many times the size that keeps the blocks used last."""

    size: float
    hit_rate: float


class PoolStats(SimpleNamespace):
    """Counts of one pool, derived from its state, and sums over its life: numbers of the protocol's PoolStats by their names.

    A tier that the pool lacks has no counts here.
    """
