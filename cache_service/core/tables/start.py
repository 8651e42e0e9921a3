"""How a waiting sequence gets its first blocks: look-up, hold and first reservation as one decision.

Rules: blocks that must be left alone are left alone (the watermark, and those reserved for an earlier arrival); pins give way
to a sequence that runs alone; all or nothing (R7).
"""

from typing import NamedTuple

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import HeldLogits, SessionState
from ..tiers.sequence_swap import SequenceSwapper
from ..tiers.transfers import TransferOrder
from ..values.types import NO_INT32, Int32Array, Int64Array, ReuseHint
from .missed import MissedTokens
from .prefix_lookup import PartialHit, PrefixLookup
from .prompt_watch import PromptWatch
from .reserve import Reservations
from .step_log import StepLog


class Hit(NamedTuple):
    """The prefix that a start finds: nodes [n] and their blocks [groups * n], one group of layers behind the other.

    joined: loads under way that bring a part of it, where it is not wholly on the device; else None. logits: what follows the
    whole prompt, where no token is left to compute. hosts [groups * n]: with joined, the host copies. A block of 0 is to be
    loaded where it has one, and is a hole elsewhere. partial: where the hit ends within a block; the blocks [groups * (n + 1)]
    include those of the partial node then. part_len: where whole blocks end that lack the states behind them; 0 where none do.
    """

    nodes: Int32Array
    blocks: Int32Array
    joined: list[tuple[TransferOrder, int]] | None
    logits: bytes | None
    hosts: Int32Array = NO_INT32
    partial: PartialHit | None = None
    part_len: int = 0

    def num_tokens(self, block_size: int) -> int:
        return len(self.nodes) * block_size if self.partial is None else self.partial.num_tokens

    @property
    def num_loads(self) -> int:
        """Blocks that are to be loaded, but for those under way."""
        return 0 if self.joined is None else int(np.count_nonzero((self.blocks == 0) & (self.hosts > 0)))


class Fit(NamedTuple):
    """A start: new table entries and slots that it would get, and how many blocks it lacks, 0 where it fits.

    num_wanted: available blocks that it would take for all that it asks for, those that it must leave alone included.
    """

    num_new: int
    num_slots: int
    num_short: int
    num_wanted: int


class SequenceStarter:
    """Starts the waiting sequences of one pool."""

    def __init__(
        self,
        state: PoolState,
        lookup: PrefixLookup,
        reservations: Reservations,
        swapper: SequenceSwapper | None,
        prompts: PromptWatch,
        missed: MissedTokens,
    ) -> None:
        self._block_size = state.config.block_size
        self._clock = state.clock
        self._sequences = state.sequences
        self._index = state.index
        self._pool = state.pool
        self._blocks_left = state.blocks_left
        self._claims = state.claims
        self._publisher = state.publisher
        self._pin_preemption = state.pin_preemption
        self._counters = state.counters
        self._lookup = lookup
        self._reservations = reservations
        self._swapper = swapper
        self._prompts = prompts
        self._missed = missed

    def start(
        self, owner: SessionState, log: StepLog, slot: int, max_hit: int, max_new: int, *, num_spare: int, exactly: int = 0
    ) -> bool:
        """Admits a waiting sequence with 1 to max_new slots beyond its hit, or with `exactly` so many; or changes nothing.

        Takes at most max_hit tokens from the index, and leaves at least one to compute (R4), or else finds the logits that
        follow the whole prompt, which the session then holds; leaves num_spare blocks alone. Look-up, hold and reservation are
        one decision, so that no other start takes the match away. Where a part of the hit is in the host tier only, it is
        LOADING afterwards; for want of room for that it starts on the blocks of the device. While blocks are reserved for an
        earlier arrival it is refused. A refusal is a claim, but not with `exactly`: that one is an error and leaves no trace.
        """
        claims = self._claims
        hit = self._find_hit(owner, slot, max_hit, exactly)
        if owner.takes_partial and self._sequences.has_states and hit.joined is None and not exactly:
            hit = hit._replace(part_len=self._lookup.find_part(slot, max_hit))
        fit = self._fit(slot, hit, max_new, num_spare, exactly)
        if fit.num_short and (hit.joined is not None or hit.partial is not None):
            hit = self._part_on_device(hit)
            fit = self._fit(slot, hit, max_new, num_spare, exactly)
        is_later = bool(claims.claims) and claims.is_later(slot)
        if fit.num_short and not is_later and self._pin_preemption.make_pins_give_way(slot, fit.num_short, hit.blocks):
            return self.start(owner, log, slot, max_hit, max_new, num_spare=num_spare, exactly=exactly)
        if fit.num_short or is_later:
            self._counters.num_refusals += 1
            self._counters.num_refused_starts += 1
            if not exactly:
                claims.add_claim(owner, slot, max(1, fit.num_wanted))
            return False
        if claims.claims:
            claims.forget_claim(slot)
        is_look_up = max_hit > 0 and self._lookup.is_on
        if is_look_up:
            num_part = 0 if hit.partial is None else hit.partial.node.num_tokens
            self._missed.note(slot, hit.nodes, max_hit, num_part, is_load=hit.joined is not None)
        self._admit(owner, log, slot, hit, fit, is_look_up=is_look_up)
        return True

    def could_hit_more(self, slots: Int64Array, max_hits: Int32Array) -> bool:
        """Whether one of these waiting sequences would find more if all that is committed were published."""
        pending = self._publisher.pending_slots()
        return len(pending) > 0 and self._lookup.could_grow(slots, max_hits, pending)

    def _find_hit(self, owner: SessionState, slot: int, max_hit: int, exactly: int) -> Hit:
        full = self._lookup.find_full_hit(slot, max_hit) if self._index.logits.by_node and not exactly else None
        if full is not None:
            return Hit(full.nodes, self._index.held.hit_table(full.nodes)[0], None, full.logits)
        nodes = self._lookup.match_sequence(slot, max_hit)
        if owner.takes_partial and (found := self._lookup.find_partial(slot, max_hit, len(nodes) * self._block_size)):
            return Hit(found.nodes, found.table, None, None, partial=found)
        if self._swapper is None and self._sequences.num_groups == 1:
            return Hit(nodes, self._index.block_of_node[nodes], None, None)
        blocks, hosts = self._index.held.hit_table(nodes)
        if self._swapper is None or not np.count_nonzero((blocks == 0) & (hosts > 0)):
            return Hit(nodes, blocks, None, None)
        joined = self._swapper.join_loads(owner, hosts, blocks)
        return Hit(nodes, blocks, joined, None, hosts)

    def _part_on_device(self, hit: Hit) -> Hit:
        """The first part of a hit, which needs no load."""
        on_device, nodes = self._index.block_of_node[hit.nodes] > 0, hit.nodes
        if not on_device.all():
            nodes = nodes[: int(np.argmin(on_device))]
        nodes = self._index.held.usable(nodes)
        if len(nodes) * self._block_size < self._lookup.min_tokens:
            nodes = NO_INT32
        return Hit(nodes, self._index.held.hit_table(nodes)[0], None, None)

    def _fit(self, slot: int, hit: Hit, max_new: int, num_spare: int, exactly: int) -> Fit:
        """How a start on this hit fits; what is to be loaded takes a block each."""
        seqs, entries = self._sequences, self._sequences.new_entries
        num_hits, hit_len = len(hit.nodes) + (hit.partial is not None), hit.num_tokens(self._block_size)
        least, most = hit_len + (hit.logits is None), min(hit_len + max_new, int(seqs.num_tokens[slot]))
        if exactly:
            least = most = max(exactly, hit_len)
        elif hit_len < hit.part_len < most:
            most = hit.part_len
        num_loads = hit.num_loads if hit.partial is None else seqs.num_groups  # or what is copied before it is written
        num_room = self._blocks_left.beside(hit.blocks, num_spare + num_loads)
        num_new = seqs.num_blocks(most) - num_hits
        num_taken = entries.num_blocks(num_hits, num_hits + num_new)
        num_short, num_wanted = 0, num_taken + self._pool.num_available - num_room
        if num_taken > num_room:
            num_new = entries.most_entries(num_hits, num_new, num_room)
            most = (num_hits + num_new) * self._block_size
        if most < least or (num_loads and num_room < 0):
            num_short = entries.num_blocks(num_hits, seqs.num_blocks(least)) - num_room
        return Fit(num_new, most, num_short, num_wanted)

    def _admit(self, owner: SessionState, log: StepLog, slot: int, hit: Hit, fit: Fit, *, is_look_up: bool) -> None:
        seqs, counters = self._sequences, self._counters
        num_hits, hits, hit_len = len(hit.nodes) + (hit.partial is not None), hit.blocks, hit.num_tokens(self._block_size)
        if hit.joined is not None and self._swapper is not None:
            self._swapper.start_load(owner, slot, hit.hosts, hit.blocks, hit.joined)
        else:
            self._pool.acquire(hits if seqs.num_groups == 1 else hits[hits > 0])
            if self._pool.reuse is not None and seqs.reuse_hints[slot] != ReuseHint.NONE:
                self._pool.reuse.claim(hits[:num_hits])
        new_blocks = self._reservations.take_blocks(log, slot, num_hits, fit.num_new)
        if seqs.num_groups > 1:
            by_group = np.concatenate([a.reshape(seqs.num_groups, -1) for a in (hits, new_blocks)], axis=1)
            seqs.tables.place_further(slot, 0, by_group[1:], num_hits)
            hits, new_blocks = hits[:num_hits], new_blocks[: fit.num_new]
        seqs.place_start(slot, hits, hit_len, new_blocks, fit.num_slots, owner.step_id, self._clock.now)
        counters.num_look_ups += is_look_up
        counters.num_look_up_tokens += int(seqs.num_tokens[slot]) * is_look_up
        counters.num_starts += 1
        if hit.joined is not None:
            seqs.begin_load(slot)
            return
        seqs.set_hit(slot, hit_len, hit.part_len)
        seqs.set_published(slot, len(hit.nodes), int(hit.nodes[-1] if len(hit.nodes) else seqs.roots[slot]))
        seqs.run(slot)
        if hit.partial is not None:
            if seqs.has_states:
                self._index.partials.touch(hit.partial.node)
            else:  # others would save less than a block by it, so the sequence goes on in its blocks
                self._pool.unindex(self._index.partials.forget_blocks(hit.partial.node.blocks))
            counters.num_partial_hits += 1
            counters.num_partial_hit_tokens += hit.partial.num_gained
            self._reservations.copy_hit(owner, log, slot, fit.num_slots)
        if self._prompts.is_on:
            self._prompts.note_start(slot, hit_len)
        if hit.logits is not None:
            owner.logits[int(seqs.ids[slot])] = HeldLogits(owner.step_id, hit.logits)
            counters.num_full_hits += 1
        counters.num_hits += is_look_up and num_hits > 0
        counters.num_hit_tokens += hit_len
