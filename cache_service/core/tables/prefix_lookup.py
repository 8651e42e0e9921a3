"""The look-up: how much of a prompt is cached, and may be used.

Owns the rules of a hit: at least one token is left to compute, unless stored logits stand for it (R4); nothing that is still on
its way to the host tier; nothing that has outlived its time, evicted already or not; nothing shorter than the pool's minimum;
not more than the sequence's retention lets it share. Changes nothing.
"""

from typing import NamedTuple

import numpy as np

from ..index.partial_nodes import PartialNode
from ..pool_state import PoolState
from ..tiers.host_tier import HostTier
from ..values.types import NO_INT32, Int32Array, Int64Array


class FullHit(NamedTuple):
    """Nodes [num_tokens / block size] of a whole prompt, all that it reads on the device, and the logits stored behind it."""

    nodes: Int32Array
    logits: bytes


class PartialHit(NamedTuple):
    """A hit that ends within a block: the nodes [n] of its whole blocks, what is behind them, and what a start reads of both.

    num_tokens: of all of it; num_gained: those that whole blocks would not have given. table [groups * (n + 1)]: blocks, one
    group of layers behind the other; 0 is a hole.
    """

    nodes: Int32Array
    node: PartialNode
    num_tokens: int
    num_gained: int
    table: Int32Array


class Rivals:
    """Sequences [n] with committed blocks that are not published yet.

    roots [n]: of their scopes. num_full [n]: whole blocks that they may share. tokens: the rows of all slots.
    """

    def __init__(self, slots: Int64Array, roots: Int32Array, num_full: Int32Array, tokens: Int32Array) -> None:
        self.slots, self.roots, self.num_full, self.tokens = slots, roots, num_full, tokens
        self._tokens_at: dict[int, frozenset[int]] = {}  # by place: few places are asked for

    def may_have(self, place: int, token: int) -> bool:
        """Whether one of them may have this token at this place; most prompts begin as none of them does."""
        if place not in self._tokens_at:
            self._tokens_at[place] = frozenset(self.tokens[self.slots, place].tolist())
        return token in self._tokens_at[place]


class PrefixLookup:
    """Looks up prefixes in one pool."""

    def __init__(self, state: PoolState, host: HostTier | None) -> None:
        self.is_on = state.config.prefix_caching
        self.min_tokens = state.config.min_prefix_tokens
        self._block_size = state.config.block_size
        self._sequences = state.sequences
        self._index = state.index
        self._host = host
        self._limits = [state.pool.limits, *([host.pool.limits] if host is not None else [])]  # by tier
        self._matched: dict[tuple[int, int], Int32Array] = {}  # by slot and most blocks, while index and sequences are as then
        self._matched_at = 0, 0

    def match_sequence(self, slot: int, max_hit: int) -> Int32Array:
        """[matched] nodes that a waiting sequence can start on; none where they are too few to count as a hit."""
        nodes = self._match(slot, self._most_blocks(slot, max_hit))
        return nodes if len(nodes) * self._block_size >= self.min_tokens else NO_INT32

    def find_part(self, slot: int, max_hit: int) -> int:
        """Tokens of the whole blocks that a waiting sequence could hit if all groups of layers had the states behind them."""
        num_most = self._most_blocks(slot, max_hit)
        tokens = self._sequences.tokens.known(slot)[: num_most * self._block_size]
        nodes = self.match_tokens(int(self._sequences.roots[slot]), tokens, num_most)
        return len(nodes) * self._block_size

    def find_partial(self, slot: int, max_hit: int, num_least: int) -> PartialHit | None:
        """The longest hit of more than num_least tokens that a waiting sequence can start on and that ends within a block."""
        seqs = self._sequences
        most = min(max_hit, int(seqs.num_tokens[slot]) - 1)
        if not self.is_on or not len(self._index.partials) or seqs.num_window[slot]:
            return None
        return self.match_partial(int(seqs.roots[slot]), seqs.tokens.known(slot)[: max(most, 0)], num_least)

    def match_partial(self, root: int, tokens: Int32Array, num_least: int) -> PartialHit | None:
        """The same of a prompt, of which these tokens may be found. All of it is on the device."""
        index, size = self._index, self._block_size
        if len(tokens) <= num_least or len(tokens) < self.min_tokens:
            return None
        nodes = self.in_time(index.match(root, tokens, len(tokens) // size))
        for depth in range(len(nodes), num_least // size - 1, -1):
            parent = int(nodes[depth - 1]) if depth else root
            for partial in index.partials.find(parent, tokens[depth * size :]) if index.partials.has_below(parent) else ():
                length = depth * size + partial.num_tokens
                if length <= max(num_least, self.min_tokens - 1) or self._limits[0].outlived(partial.blocks).any():
                    continue
                table = index.held.partial_table(nodes[:depth], length, partial.blocks)
                if table is not None:
                    return PartialHit(nodes[:depth], partial, length, length - num_least, table)
        return None

    def could_grow(self, slots: Int64Array, max_hits: Int32Array, pending: Int64Array) -> bool:
        """Whether the match of one of these waiting sequences would be longer if all that these [n] committed was published."""
        seqs = self._sequences
        num_full = np.minimum(seqs.num_committed[pending] // self._block_size, seqs.share_limits[pending])
        rivals = Rivals(pending, seqs.roots[pending], num_full, seqs.tokens.rows(pending))
        return any(
            self._is_behind(slot, max_hit, rivals) for slot, max_hit in zip(slots.tolist(), max_hits.tolist(), strict=True)
        )

    def _is_behind(self, slot: int, max_hit: int, rivals: Rivals) -> bool:
        """Whether one of these sequences has what would make the match of the waiting one longer."""
        seqs, size = self._sequences, self._block_size
        num_most = self._most_blocks(slot, max_hit)
        nodes = self._match(slot, num_most) if num_most else NO_INT32
        start, prompt = len(nodes) * size, seqs.tokens.known(slot)
        if len(nodes) == num_most or not rivals.may_have(start, int(prompt[start])):
            return False
        root, prompt, tokens = seqs.roots[slot], prompt[: start + size], rivals.tokens
        alike = rivals.slots[(rivals.roots == root) & (rivals.num_full > len(nodes))]
        alike = alike[(tokens[alike, start : start + size] == prompt[start:]).all(1)]
        last = nodes[-1] if len(nodes) else root
        return any(
            seqs.last_nodes[rival] == last or np.array_equal(tokens[rival, :start], prompt[:start]) for rival in alike.tolist()
        )

    def _most_blocks(self, slot: int, max_hit: int) -> int:
        """Blocks that a waiting sequence may hit at most."""
        seqs = self._sequences
        num_most = min(max_hit, int(seqs.num_tokens[slot]) - 1) // self._block_size if self.is_on else 0
        return min(num_most, int(seqs.share_limits[slot]))

    def _match(self, slot: int, num_most: int) -> Int32Array:
        """[matched] nodes of a waiting sequence's first blocks. A step asks for those of a start more than once."""
        seqs, now = self._sequences, (self._index.num_changes, self._sequences.num_added)
        if now != self._matched_at or self._host is not None or self.have_outlived():
            self._matched.clear()
            self._matched_at = now
        found = self._matched.get((slot, num_most))
        if found is None:
            tokens = seqs.tokens.known(slot)[: num_most * self._block_size]
            found = self._matched[slot, num_most] = self.usable(self.match_tokens(int(seqs.roots[slot]), tokens, num_most))
        return found

    def match_tokens(self, root: int, tokens: Int32Array, max_blocks: int) -> Int32Array:
        """[matched] nodes of the longest prefix in any tier that is there now: no copy of it is still on its way."""
        nodes = self.in_time(self._index.match(root, tokens, max_blocks))
        if self._host is not None and len(nodes):
            hosts = self._index.host_of_node[nodes]
            is_away = (self._index.block_of_node[nodes] == 0) & self._host.is_filling[hosts]
            if np.count_nonzero(is_away):
                nodes = nodes[: int(np.argmax(is_away))]
        return nodes

    def have_outlived(self) -> bool:
        """Whether a match may be shorter than the last one with nothing changed but the time."""
        return any(limits.have_outlived() for limits in self._limits)

    def in_time(self, nodes: Int32Array) -> Int32Array:
        """[n] the first of these nodes, up to the first whose blocks have outlived their time in every tier that has one."""
        if not len(nodes) or not self.have_outlived():
            return nodes
        is_over, is_there = np.ones(len(nodes), np.bool_), np.zeros(len(nodes), np.bool_)
        for limits, block_of_node in zip(self._limits, (self._index.block_of_node, self._index.host_of_node), strict=False):
            blocks = block_of_node[nodes]
            is_over &= (blocks == 0) | limits.outlived(blocks)
            is_there |= blocks > 0
        is_over &= is_there
        return nodes[: int(np.argmax(is_over))] if is_over.any() else nodes

    def usable(self, nodes: Int32Array) -> Int32Array:
        """[usable] the longest start of a match behind which each group of layers has what the next token reads."""
        return self._index.held.usable(nodes, None if self._host is None else self._host.is_filling)

    def whole_windows(self, nodes: Int32Array) -> list[bool]:
        """Whether each group of layers behind the first has what its window reads behind all of these nodes.

        None of a tail, which ends no hit.
        """
        if self._index.held.has_tail:
            return []
        blocks, hosts = self._index.held.hit_table(nodes)
        if self._host is not None:
            hosts = np.where(self._host.is_filling[hosts], 0, hosts)
        there = (np.maximum(blocks, hosts) > 0).reshape(len(self._index.held.spans), -1)
        firsts = (self._index.held.first_entry(len(nodes), group) for group in range(1, len(there)))
        return [bool(row[first:].all()) for row, first in zip(there[1:], firsts, strict=True)]

    def match_prompt(self, scope: str, tokens: Int32Array) -> Int32Array:
        """[matched] nodes of a prompt of this scope, whole blocks, in any tier."""
        return self.match_tokens(self._index.find_root(scope), tokens, len(tokens) // self._block_size)

    def find_full_hit(self, slot: int, max_hit: int) -> FullHit | None:
        """The hit of a waiting sequence whose prompt needs no pass at all, if it has one."""
        seqs = self._sequences
        known = int(seqs.num_tokens[slot])
        num_blocks, rest = divmod(known, self._block_size)
        if rest or max_hit < known or known < self.min_tokens or num_blocks > seqs.share_limits[slot]:
            return None
        nodes = self.in_time(self._index.match(int(seqs.roots[slot]), seqs.tokens.known(slot), num_blocks))
        if np.count_nonzero(self._index.block_of_node[nodes]) < num_blocks or len(self._index.held.usable(nodes)) < num_blocks:
            return None
        logits = self._index.logits.get(int(nodes[-1]))
        return None if logits is None else FullHit(nodes, logits)
