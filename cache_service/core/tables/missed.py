"""MissedTokens: why a start does not find the rest of its tokens.

Owns the order of the causes, of which the first that holds counts: what a start never takes, what it may not share, what it did
not ask for, what is in the index and cannot be had, what a lower tier has, what is being computed, what left the index, what
another scope has, and last what was never there. Also which scope asked last for what prompts begin with. Changes nothing but
counts; called before a start takes blocks, because that evicts.
"""

import numpy as np

from ..index.miss_counts import LookUp, MissKind
from ..pool_state import PoolState
from ..values.types import Int32Array, MatchEnd, SequenceState
from .prefix_lookup import PrefixLookup

_MOST_BEGINNINGS = 4096
_RUNNING, _LOADING = np.int8(SequenceState.RUNNING), np.int8(SequenceState.LOADING)


class MissedTokens:
    """The missed tokens of one pool's starts."""

    def __init__(self, state: PoolState, lookup: PrefixLookup) -> None:
        self._state, self._lookup = state, lookup
        self._size = state.config.block_size
        config = state.config
        self._may_leave = config.min_prefix_tokens > 0 or config.num_host_blocks > 0 or len(config.group_spans) > 1
        self._sequences, self._index, self._counts = state.sequences, state.index, state.misses
        self._roots: dict[bytes, int] = {}  # by the first block of a prompt of which nothing was found

    def note(self, slot: int, nodes: Int32Array, max_hit: int, num_part: int, *, is_load: bool) -> None:
        """A waiting sequence has looked up its tokens, starts on these nodes, and took at most max_hit tokens.

        num_part: tokens that it found of the block behind them. is_load: once a part of the nodes is loaded.
        """
        seqs, size = self._sequences, self._size
        tokens, root, num_hits = seqs.tokens.known(slot), int(seqs.roots[slot]), len(nodes)
        tenant = int(seqs.tenants[slot])
        if is_load:
            self._counts.add(num_hits * size, MissKind(tenant, MatchEnd.LOADING))
        if num_hits * size == len(tokens):
            return
        num_whole = (len(tokens) - 1) // size  # a token is left to compute
        num_shared = min(num_whole, int(seqs.share_limits[slot]))
        num_most = min(num_shared, max_hit // size)
        num_end, num_apart = len(tokens) - num_whole * size, (num_whole - num_shared) * size
        num_not_asked = (num_shared - num_most) * size
        num_counted = num_others = 0
        parent = int(nodes[-1]) if num_hits else root
        if num_hits < num_most:
            known = tokens[: num_most * size]
            self._counts.add(size - num_part if num_part else 0, MissKind(tenant, MatchEnd.PARTIAL_BLOCK))
            if self._may_leave or self._lookup.have_outlived():
                nodes = self._count_unusable(root, nodes, known, num_hits + (num_part > 0))
            if num_part and len(nodes) == num_hits:
                num_counted = 1  # its block; what is behind a block that is found in part is in no tier
            num_hits, parent = len(nodes), int(nodes[-1]) if len(nodes) else root
            if self._state.below is not None and not num_counted:
                num_counted = self._count_below(root, parent, nodes, known)
            num_counted += self._count_computing(root, num_hits + num_counted, known)
            if not num_hits and num_counted < num_most:
                num_others = self._num_others(root, known)
        elif num_part:  # of what is not asked for, or else of the end
            num_end -= num_part * (num_most == num_whole)
            num_not_asked -= num_part * (num_most < num_whole)
        behind, log = tokens[num_hits * size : num_most * size].copy(), self._index.eviction_log
        left = LookUp(
            tenant, num_end, num_apart, num_not_asked, log.digest(parent), behind, num_counted, num_others,
            log.num_removed,
        )  # fmt: skip
        self._counts.note(left)

    def _count_unusable(self, root: int, hit: Int32Array, tokens: Int32Array, done: int) -> Int32Array:
        """Counts what of the match is no hit, behind the first `done` blocks. Returns all of its nodes."""
        lookup, size, num_hits = self._lookup, self._size, len(hit)
        nodes = self._index.match(root, tokens, len(tokens) // size)
        if len(nodes) == num_hits:
            return hit
        in_time = lookup.in_time(nodes)
        there = lookup.match_tokens(root, tokens, len(tokens) // size)
        num_usable = len(lookup.usable(there))
        if self._index.held.has_states and len(there) > num_hits:
            cut = there[num_hits:]
            self._state.pool.policy.note_cut(self._index.block_of_node[cut], self._index.held.num_lost(cut))
        is_short = not num_hits and num_usable * size < lookup.min_tokens
        for cause, end in (
            (MatchEnd.BELOW_MINIMUM if is_short else MatchEnd.NOT_LOADED, num_usable),
            (MatchEnd.BEHIND_A_HOLE, len(there)),
            (MatchEnd.NOT_LOADED, len(in_time)),  # its copy is on its way to the host tier
            (MatchEnd.EXPIRED, len(nodes)),
        ):
            self._counts.add(max(end - done, 0) * size, MissKind(self._tenant(root), cause))
            done = max(done, end)
        return nodes

    def _tenant(self, root: int) -> int:
        return int(self._index.roots.tenant_of[-root])

    def _count_below(self, root: int, parent: int, nodes: Int32Array, tokens: Int32Array) -> int:
        """Counts what a disk or a store has of these tokens behind these nodes. Returns how many blocks that are."""
        below, num_found = self._state.below, len(nodes)
        assert below is not None, "asked where there is no such tier"
        if num_found * self._size >= len(tokens):
            return 0
        scope = "" if num_found else self._index.roots.scope(root)
        cause = below.end_behind(scope, parent, tokens[num_found * self._size :].astype("<i4").tobytes())
        if cause is None:
            return 0
        num_below = max(len(below.tiers_behind(scope, tokens, nodes)), 1)
        self._counts.add(num_below * self._size, MissKind(self._tenant(root), cause))
        return num_below

    def _count_computing(self, root: int, num_found: int, tokens: Int32Array) -> int:
        """Counts what running sequences know and will share, behind the first blocks. Returns how many blocks that are."""
        seqs, size, start = self._sequences, self._size, num_found * self._size
        if not seqs.num_active or start >= len(tokens):
            return 0
        rows = seqs.tokens.all
        alike = (rows[:, start] == tokens[start]).nonzero()[0]  # most prompts go on as no other does
        if not len(alike):
            return 0
        alike = alike[((seqs.states[alike] == _RUNNING) | (seqs.states[alike] == _LOADING)) & (seqs.roots[alike] == root)]
        longest = 0
        for rival in alike.tolist():
            num_known = min(int(seqs.num_tokens[rival]) // size, int(seqs.share_limits[rival]), len(tokens) // size)
            differ = np.flatnonzero(rows[rival, : num_known * size] != tokens[: num_known * size])
            longest = max(longest, int(differ[0]) // size if len(differ) else num_known)
        num_computing = max(longest - num_found, 0)
        self._counts.add(num_computing * size, MissKind(self._tenant(root), MatchEnd.COMPUTING))
        return num_computing

    def _num_others(self, root: int, tokens: Int32Array) -> int:
        """Blocks that the scope has cached which asked for the same beginning before. Notes that this one did."""
        key, roots = tokens[: self._size].tobytes(), self._roots
        other = roots.pop(key, root)
        if len(roots) >= _MOST_BEGINNINGS:
            del roots[next(iter(roots))]
        roots[key] = root
        return len(self._index.match(other, tokens, len(tokens) // self._size)) if other != root else 0
