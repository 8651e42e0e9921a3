"""The state of one pool: its parts, put together, and what all of them share.

Owns the parts, the one clock, the revision, the live sessions by id, and what sessions that ended left behind. Everything above
works on it and is handed it. Knows no operation, and of the tiers below the device only that there may be one.
"""

from collections import deque
from functools import partial
from typing import Any, Protocol

import numpy as np

from .blocks.allocator import BlockAllocator
from .blocks.block_pool import BlockPool
from .blocks.blocks_left import BlocksLeft
from .blocks.pins import Pins
from .blocks.pressure import PressureGauge
from .blocks.room_ahead import RoomAhead
from .index.below_blocks import BelowBlocks
from .index.miss_counts import MissCounts
from .index.node_names import NodeNames
from .index.prefix_index import PrefixIndex
from .index.reach import Reach
from .sequences.claims import Claims, StartNumbers
from .sequences.pin_preemption import PinPreemption
from .sequences.publisher import ALL_BLOCKS, Publisher
from .sequences.sequence_table import SequenceTable
from .sequences.session_state import SessionState
from .sequences.spans import SpanDrops
from .values.clock import Clock
from .values.counters import Counters
from .values.errors import InvalidField, UnknownSequence, UnknownSession
from .values.kv_spec import block_name, first_parent
from .values.pool_config import PoolConfig
from .values.types import Executor, Int32Array, MatchEnd, PressureLevel, SequenceState, SessionId, Tier


class LowerTier(Protocol):
    """The tier below the device, as the device's blocks and the index know it."""

    def demote(self, victims: Int32Array) -> Int32Array:
        """Moves evicted blocks there as far as it has room; returns those that are to be forgotten."""

    def drop_copies(self, hosts: Int32Array) -> None:
        """The nodes of these host blocks were forgotten."""


class LowerTiers(Protocol):
    """The tiers below the host tier, as far as the calls know them."""

    def expect(self, slot: int) -> None:
        """A sequence was created in this slot: what it wants is brought, as far as they have it."""

    def prefetch(self, root: int, tokens: Int32Array) -> None:
        """What the nearest tier that has any of these tokens has of them is brought to the host tier."""

    def length_to_come(self, slot: int, max_hit: int) -> int:
        """Tokens that the waiting sequence could hit once what it waits for has come; 0 where it is not to wait."""

    def uses(self, root: int) -> bool:
        """Whether something on its way is for this root."""

    def end_behind(self, scope: str, node: int, tokens: bytes) -> MatchEnd | None:
        """Why the first block of these tokens behind this node is in no tier above, where one of them has it.

        What is behind it, in whole blocks, decides whether a load of all of them would pay. node 0: that of a scope that this
        run has not met.
        """

    def tiers_behind(self, scope: str, tokens: Int32Array, nodes: Int32Array) -> list[Tier]:
        """[n] the nearest tier of each block of a prompt behind these nodes, as far as all are known to be in one."""

    def may_ask(self) -> bool:
        """Whether one of them may have more than is known: it would have to be asked."""

    def begin_clearing(self) -> None: ...

    def end_clearing(self) -> None: ...

    def stats(self) -> dict[str, Any]: ...

    def host_ends(self) -> tuple[Int32Array, Int32Array]:
        """Host blocks, one entry for each order that has an end there, and those of them that are being filled."""

    def check(self) -> list[str]: ...


class PoolState:
    """One pool. Sessions, sequences and blocks are read through its parts, and changed by their methods."""

    def __init__(self, config: PoolConfig, start_numbers: StartNumbers | None = None, spec_key: bytes = b"") -> None:
        """start_numbers: of the whole service; a pool alone has its own. spec_key: KvSpec.key, for the names of blocks.

        Raises InvalidField for a config that cannot work.
        """
        _check_config(config)
        self.config = config
        self.clock = Clock()
        self.revision = 0
        self.start_numbers = start_numbers or StartNumbers()
        self.sessions: dict[SessionId, SessionState] = {}
        self.ended_sessions: deque[SessionState] = deque()  # their sequences still hold blocks
        self.quarantines: dict[SessionId, Int32Array] = {}  # blocks that an ended session may still write
        self.counters = Counters()
        self.sequences = SequenceTable(config)
        self.index = PrefixIndex(
            *(config.num_blocks, config.block_size, config.logits_memory, config.num_host_blocks),
            lose_hosts=self._lose_hosts,
            clock=self.clock,
            group_spans=config.group_spans,
            has_tail=config.has_tail,
            max_partial_nodes=config.max_partial_nodes,
        )
        self.index.roots.is_idle = self._is_idle
        self.below_blocks = BelowBlocks()
        self.block_names = NodeNames(self.index, block_name, partial(first_parent, spec_key))  # as clients see them
        num_kept = config.num_usable_blocks + max(config.num_host_blocks - 1, 0)
        self.reach = Reach(config.block_size, self.clock, self.counters, num_kept)
        self.misses = MissCounts(self.index.eviction_log, config.block_size, num_kept)
        self.pool = BlockPool(config, self.index, self._forget_blocks)
        self.allocator = BlockAllocator(self.pool, self.index, self.counters)
        self.blocks_left = BlocksLeft(config, self.pool)
        self.pins = Pins(self.pool)
        self.claims = Claims(self.sequences, self.pool, self.clock)
        self.publisher = Publisher(config, self.sequences, self.index, self.pool, self.counters)
        self.spans = SpanDrops(self.sequences, self.publisher, self.pool, self.counters)
        self.pin_preemption = PinPreemption(self.sequences, self.pool, self.pins)
        self.lower_tier: LowerTier | None = None  # set where there is one
        self.below: LowerTiers | None = None  # set where there is one
        self.gauge = PressureGauge(config.pressure_levels, config.num_usable_blocks)
        self.gauge.on_change = self._report_pressure
        self.room_ahead = RoomAhead(config.num_usable_blocks)
        self._num_spare_blocks = int(config.num_usable_blocks * config.watermark)

    # Time

    @property
    def now(self) -> float:
        """Seconds of a monotone clock, as last set by `tick`."""
        return self.clock.now

    def tick(self, now: float) -> None:
        """It is this late."""
        self.clock.now = now

    # Look-ups

    def session(self, session: SessionId) -> SessionState:
        """Raises UnknownSession."""
        if session not in self.sessions:
            raise UnknownSession("no live session of this id on this pool")
        return self.sessions[session]

    def find_sequence(self, session: SessionId, sequence_id: int) -> tuple[SessionState, int]:
        """The session and the slot of its sequence. Raises UnknownSession, UnknownSequence."""
        owner = self.session(session)
        slot = owner.ids.get(sequence_id)
        if slot is None:
            raise unknown_sequence(sequence_id)
        return owner, slot

    def slot_limit(self, owner: SessionState) -> int | None:
        """The limit that keeps a session from another sequence now, or None where it may have one.

        The sessions of a caller leave a tenth of the slots to other callers. An engine may use all of them: what it serves has
        shares of its own.
        """
        limit = self.config.max_sequences
        if not self.sequences.num_free_slots:
            return limit
        share = limit - limit // 10
        if owner.executor is Executor.ENGINE or not owner.caller or self.sequences.num_free_slots > limit - share:
            return None
        num_own = sum(len(other.ids) for other in self.sessions.values() if other.caller == owner.caller)
        return share if num_own >= share else None

    # Blocks

    def num_spare(self) -> int:
        """Blocks kept for running sequences to grow into; when none runs, nothing is to be kept."""
        return self._num_spare_blocks if self._num_spare_blocks and self.sequences.num_active else 0

    def update_pressure(self) -> PressureLevel:
        """Blocks were taken, or came free."""
        return self.gauge.update(self.pool.num_used)

    def publish(self, max_blocks: int = ALL_BLOCKS) -> bool:
        """Publishes up to so many blocks of what steps have committed. Whether more is left."""
        self.sequences.tokens.settle()
        is_left = self.publisher.publish(max_blocks)
        self.update_pressure()
        return is_left

    def _is_idle(self, root: int) -> bool:
        """Whether nothing is below a root and nothing needs it, so that another scope may have its number.

        While changes are unread, none may: they name roots by numbers.
        """
        changes, seqs = self.index.change_log, self.sequences
        if self.index.links.first_child[root] or self.index.partials.has_below(root):
            return False
        if changes is not None and len(changes) and not changes.has_overflowed:
            return False
        if ((seqs.roots == root) & (seqs.states != SequenceState.FREE_SLOT)).any():
            return False
        return self.below is None or not self.below.uses(root)

    def _report_pressure(self, level: PressureLevel) -> None:
        if self.index.change_log is not None:
            self.index.change_log.pressure_changed(level)

    def _forget_blocks(self, blocks: Int32Array, why: MatchEnd) -> Int32Array:
        """These leave the device: for the tier below, or for good with what is below them in the index.

        Returns the other blocks that lost their entry.
        """
        if self.lower_tier is not None and why is MatchEnd.EVICTED:
            is_partial = self.index.partials.is_named[blocks]  # no lower tier has any
            blocks = np.concatenate([blocks[is_partial], self.lower_tier.demote(blocks[~is_partial])])
        return self.publisher.forget_blocks(blocks, why)

    def _lose_hosts(self, hosts: Int32Array) -> None:
        assert self.lower_tier is not None, "host copies without a host tier"
        self.lower_tier.drop_copies(hosts)


def _check_config(config: PoolConfig) -> None:
    for name, least in (("num_blocks", 2), ("block_size", 1), ("max_sequences", 1), ("max_tokens_per_sequence", 1)):
        if getattr(config, name) < least:
            raise InvalidField(f"{name} is {least} or more", field=name, limit=least)
    spans = config.group_spans
    if not spans or not spans[0].is_whole or min(span.num_tokens for span in spans) < 0:
        raise InvalidField("the first group of layers reads all tokens", field="group_spans", limit=0)
    if config.has_states and (config.has_tail or any(span.checkpoint_blocks < 0 for span in spans)):
        raise InvalidField("a group of states is beside no tail, and keeps each 1st entry or fewer", field="group_spans")
    if not 0 <= config.watermark < 1:
        raise InvalidField("watermark is a share from 0 to below 1", field="watermark", limit=1)
    if config.num_host_blocks and config.num_host_blocks < 2:
        raise InvalidField("num_host_blocks is 0, or 2 or more", field="num_host_blocks", limit=2)
    if not 0 <= config.soon_share <= 1:
        raise InvalidField("soon_share is a share from 0 to 1", field="soon_share", limit=1)
    if not 0 < config.evict_above <= 1:
        raise InvalidField("evict_above is a share above 0 and up to 1", field="evict_above", limit=1)


def unknown_sequence(sequence_id: int) -> UnknownSequence:
    """What a sequence id that a session does not have gets."""
    return UnknownSequence(f"no sequence {sequence_id} in this session", sequence_id=sequence_id)
