"""How a waiting sequence gets its first blocks: look-up, hold and first reservation as one decision.

Rules: at least one token is left to compute, unless stored logits stand for it (R4); what must be left alone is left alone (the
watermark, and what elder sequences are owed); pins give way to a sequence that runs alone; all or nothing.
"""

from typing import NamedTuple

import numpy as np

from ..sequences.session_state import HeldLogits, SessionState
from ..values.types import NO_INT32, Int32Array, SequenceState
from .table_base import StepLog, TableBase


class Fit(NamedTuple):
    """A start: new blocks and slots that it would get, and how many blocks it lacks, 0 where it fits.

    num_wanted: available blocks that it would take for all that it asks for, those that it must leave alone included.
    """

    num_new: int
    num_slots: int
    num_short: int
    num_wanted: int


class SequenceStarter(TableBase):
    """See the module."""

    def match(self, slot: int, max_hit: int) -> Int32Array:
        """[matched] nodes that a waiting sequence can start on; at least one token is left to compute (R4).

        None where they are too few to count as a hit.
        """
        seqs = self.sequences
        known = int(seqs.num_tokens[slot])
        num_most = min(max_hit, known - 1) // self._block_size if self.prefix_caching else 0
        num_most = min(num_most, int(seqs.share_limits[slot]))
        nodes = self.match_tokens(int(seqs.roots[slot]), seqs.tokens[slot, :known], num_most)
        return nodes if len(nodes) * self._block_size >= self.min_prefix_tokens else NO_INT32

    def match_tokens(self, root: int, tokens: Int32Array, max_blocks: int) -> Int32Array:
        """[matched] nodes of the longest prefix in any tier that is there now: no copy of it is still on its way."""
        nodes = self.index.match(root, tokens, max_blocks)
        if self.swapper is not None and len(nodes):
            hosts = self.index.host_of_node[nodes]
            is_away = (self.index.block_of_node[nodes] == 0) & self.swapper.host.is_filling[hosts]
            if np.count_nonzero(is_away):
                nodes = nodes[: int(np.argmax(is_away))]
        return nodes

    def full_hit(self, slot: int, max_hit: int) -> tuple[Int32Array, bytes] | None:
        """[num_tokens / block size] blocks of a waiting sequence's whole prompt, and the logits stored behind it."""
        seqs = self.sequences
        known = int(seqs.num_tokens[slot])
        num_blocks, rest = divmod(known, self._block_size)
        if rest or max_hit < known or known < self.min_prefix_tokens or num_blocks > seqs.share_limits[slot]:
            return None
        nodes = self.index.match(int(seqs.roots[slot]), seqs.tokens[slot, :known], num_blocks)
        blocks = self.index.block_of_node[nodes]
        if np.count_nonzero(blocks) < num_blocks:
            return None
        logits = self.index.logits.get(int(nodes[-1]))
        return None if logits is None else (blocks, logits)

    def start(
        self, owner: SessionState, log: StepLog, slot: int, max_hit: int, max_new: int, *, num_spare: int, exactly: int = 0
    ) -> bool:
        """Admits a waiting sequence with 1 to max_new slots beyond its hit, or with `exactly` so many; or changes nothing.

        Takes at most max_hit tokens from the index, and leaves at least one to compute (R4), or else finds the logits that
        follow the whole prompt, which the owner then holds; leaves num_spare blocks alone.
        Look-up, hold and first reservation are one decision, so nobody steals the match. Where a part of the hit is in the
        host tier only, it is LOADING afterwards; for want of room for that it starts on what is on the device. While an elder
        sequence is owed blocks it is refused. A refusal is a claim, but not with `exactly`: that one is an error and leaves no
        trace.
        """
        seqs, pool = self.sequences, self.pool
        known = int(seqs.num_tokens[slot])
        full = self.full_hit(slot, max_hit) if self.index.logits.by_node and not exactly else None
        nodes = self.match(slot, max_hit) if full is None else self.index.node_of_block[full[0]]
        hits, joined, num_least = self.index.block_of_node[nodes], None, int(full is None)
        if self.swapper is not None and np.count_nonzero(hits) < len(hits):
            joined = self.swapper.join(owner, nodes, hits)
        fit = self._fit(hits, known, num_least, max_new, num_spare, exactly)
        if fit.num_short and joined is not None:
            on_device = self.index.block_of_node[nodes] > 0
            nodes, joined = nodes[: int(np.argmin(on_device))], None
            if len(nodes) * self._block_size < self.min_prefix_tokens:
                nodes = NO_INT32
            hits = self.index.block_of_node[nodes]
            fit = self._fit(hits, known, num_least, max_new, num_spare, exactly)
        is_younger = bool(self.claims.claims) and self.claims.is_younger(slot)
        if fit.num_short and not is_younger and self.pins_give_way(slot, fit.num_short, hits):
            return self.start(owner, log, slot, max_hit, max_new, num_spare=num_spare, exactly=exactly)
        if fit.num_short or is_younger:
            self.counters.num_refusals += 1
            self.counters.num_refused_starts += 1
            if not exactly:
                self.claims.refuse(owner, slot, max(1, fit.num_wanted))
            return False
        if self.claims.claims:
            self.claims.forget(slot)
        num_new, most = fit.num_new, fit.num_slots
        hit_len = len(hits) * self._block_size
        if joined is not None and self.swapper is not None:
            self.swapper.start(owner, slot, nodes, hits, joined)
        else:
            pool.acquire(hits)
        seqs.tables[slot, : len(hits)] = hits
        seqs.tables[slot, len(hits) : len(hits) + num_new] = self._allocate(log, num_new, seqs.roots[slot])
        is_look_up = max_hit > 0 and self.prefix_caching
        self.counters.num_look_ups += is_look_up
        self.counters.num_look_up_tokens += known * is_look_up
        self.counters.num_starts += 1
        seqs.num_hit[slot] = hit_len
        seqs.num_reserved[slot] = most
        seqs.last_reserve_step[slot] = owner.step_id
        seqs.touch(slot, self.claims.now)
        if joined is not None:
            seqs.states[slot] = SequenceState.LOADING
            return True
        for column in (seqs.num_committed, seqs.num_reserved_before):
            column[slot] = hit_len
        seqs.num_published[slot] = len(hits)
        seqs.last_nodes[slot] = nodes[-1] if len(nodes) else seqs.roots[slot]
        seqs.states[slot] = SequenceState.RUNNING
        if full is not None:
            owner.logits[int(seqs.ids[slot])] = HeldLogits(owner.step_id, full[1])
            self.counters.num_full_hits += 1
        self.counters.num_hits += is_look_up and len(hits) > 0
        self.counters.num_hit_tokens += hit_len
        return True

    def _fit(self, hits: Int32Array, known: int, num_least: int, max_new: int, num_spare: int, exactly: int) -> Fit:
        """How a start on these blocks fits; the zeros are to be loaded, and take a block each."""
        hit_len = len(hits) * self._block_size
        least, most = hit_len + num_least, min(hit_len + max_new, known)
        if exactly:
            least = most = max(exactly, hit_len)
        num_loads = len(hits) - int(np.count_nonzero(hits))
        num_apart = self.pool.num_revived(hits) + num_spare + num_loads  # available, but not for new blocks
        num_room = self.pool.num_available - num_apart
        num_new = self.sequences.num_blocks(most) - len(hits)
        num_short, num_wanted = 0, num_new + num_apart
        if num_new > num_room:
            num_new = max(num_room, 0)
            most = (len(hits) + num_new) * self._block_size
        if most < least or (num_loads and num_room < 0):
            num_short = self.sequences.num_blocks(least) - len(hits) - num_room
        return Fit(num_new, most, num_short, num_wanted)

    def could_pins_give_way(self, slot: int | None, num_short: int, hits: Int32Array) -> bool:
        """Whether so many blocks, beside these hits, would come free of pins for a sequence that could not go on otherwise.

        Only for one that runs alone: whatever else holds blocks ends some day, and fences are lifted soon.
        """
        if not self.pins or num_short <= self.pool.num_fenced:
            return False
        states = self.sequences.states
        holding = np.flatnonzero((states == SequenceState.RUNNING) | (states == SequenceState.LOADING))
        is_alone = all(other == slot for other in holding.tolist())
        return is_alone and self.pins.could_give_way(num_short, hits)

    def pins_give_way(self, slot: int, num_short: int, hits: Int32Array) -> bool:
        """The same, done where it can be."""
        gives_way = self.could_pins_give_way(slot, num_short, hits)
        if gives_way:
            self.pins.give_way(num_short, hits)
        return gives_way
