"""Explains to people why a prompt's match ends where it ends; may take about a millisecond.

Looks at the index, at the nodes that left it lately (eviction_log.py) and at the running sequences, of the asking scope only:
nothing that other scopes store shows here, neither in the end nor in what the nearest block has in common. Changes nothing.
"""

from dataclasses import dataclass

import numpy as np

from ..index.prefix_index import PrefixIndex
from ..pool_state import PoolState
from ..sequences.sequence_table import SequenceTable
from ..tables.prefix_lookup import PrefixLookup
from ..values.types import Int32Array, MatchEnd, SequenceState
from .prefix_match import NOTHING_BEHIND, Behind, tiers_behind

_MAX_CHILDREN = 1024  # of the last matched block that are compared with what comes next, the youngest first


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where and why a match ends. Lengths are tokens. seconds_ago only where the next block is known to have gone."""

    num_prompt: int
    num_matched: int  # in any tier, as far as it is known without asking
    num_host: int  # of them in the host tier only
    num_hit: int  # that a start would take, all of them where the logits behind them are stored
    num_common: int  # behind the matched ones, in the nearest cached block
    end: MatchEnd
    seconds_ago: float | None = None
    short_group: int | None = None  # a group of layers whose window, or whose last state, ends the hit before the match
    is_state: bool = False  # that group has states
    behind: Behind = NOTHING_BEHIND  # of the matched ones, those in no tier above the disk


def explain_match(state: PoolState, lookup: PrefixLookup, scope: str, tokens: Int32Array) -> Explanation:
    """tokens [1 or more]."""
    index, size = state.index, state.config.block_size
    root = index.find_root(scope)
    nodes = lookup.match_prompt(scope, tokens)
    behind = tiers_behind(state, scope, tokens, nodes)
    num_matched = len(nodes) * size  # on the device or in the host tier
    last = int(nodes[-1]) if len(nodes) else root
    num_host = int(np.count_nonzero(index.block_of_node[nodes] == 0)) * size
    num_hit = len(lookup.usable(nodes[: (len(tokens) - 1) // size])) * size
    is_whole = num_matched == len(tokens) and not num_host and len(index.held.usable(nodes)) == len(nodes)
    if is_whole and last in index.logits.by_node:
        num_hit = num_matched
    elif (partial := lookup.match_partial(root, tokens[:-1], num_hit)) is not None:
        num_hit = partial.num_tokens
    short_group = None
    if num_hit < min(num_matched, (len(tokens) - 1) // size * size):
        short_group = _short_group(lookup, nodes[: (len(tokens) - 1) // size])
    if 0 < num_hit < state.config.min_prefix_tokens:
        end, seconds_ago, num_hit = MatchEnd.BELOW_MINIMUM, None, 0
    else:
        end, seconds_ago = _end(state, lookup, scope, tokens, root, last, num_matched)
    return Explanation(
        num_prompt=len(tokens),
        num_matched=num_matched + behind.num_disk + behind.num_remote,
        num_host=num_host,
        num_hit=num_hit,
        num_common=_num_common(index, last, tokens[num_matched : num_matched + size], size),
        end=end,
        seconds_ago=seconds_ago,
        short_group=short_group,
        is_state=short_group is not None and bool(state.config.group_spans[short_group].checkpoint_blocks),
        behind=behind,
    )


def _short_group(lookup: PrefixLookup, nodes: Int32Array) -> int | None:
    """The first group of layers of which a hit on all of these nodes would read what no tier has."""
    return next((group for group, is_whole in enumerate(lookup.whole_windows(nodes), 1) if not is_whole), None)


def in_words(found: Explanation) -> str:
    """The same for people."""
    first = f"{found.num_matched:,} of {found.num_prompt:,} tokens are cached"
    places = (
        (found.num_host, "in the host tier only"),
        (found.behind.num_disk, "on the disk"),
        (found.behind.num_remote, "in the remote tier"),
    )
    shares = [f"{number:,} of them {place}" for number, place in places if number]
    first += f" ({', '.join(shares)})" if shares else ""
    why = _WORDS[found.end]
    if found.end is MatchEnd.EVICTED and found.seconds_ago is None:
        why = "the next block is on its way to the host tier"
    if found.seconds_ago is not None:
        why += f" {found.seconds_ago:,.1f} s ago"
    if found.num_common:
        why += f"; the nearest cached block has {found.num_common:,} more tokens in common"
    text = f"{first}: {why}. A start would take {found.num_hit:,}."
    if found.behind.remote_not_asked:
        text += " The remote tier was not asked for more."
    if found.short_group is not None:
        lacking = "the state" if found.is_state else "what its window reads"
        text += f" Group {found.short_group} of the layers lacks {lacking} behind more."
    return text


_WORDS = {
    MatchEnd.COMPLETE: "all of them",
    MatchEnd.PARTIAL_BLOCK: "the rest is less than a whole block",
    MatchEnd.NEVER_STORED: "what comes next was never stored behind them, or went too long ago to be remembered",
    MatchEnd.EVICTED: "the next block was evicted",
    MatchEnd.EXPIRED: "the next block outlived its time",
    MatchEnd.CLEARED: "the cache was cleared",
    MatchEnd.COMPUTING: "a running sequence is computing the next block",
    MatchEnd.BELOW_MINIMUM: "so short a prefix does not count on this pool",
    MatchEnd.CACHING_OFF: "this pool does not cache prefixes",
    MatchEnd.ON_DISK: "the next block is in the disk or remote tier, from which a sequence that is created has it loaded",
    MatchEnd.DISK_RESTS: "the next block is in the disk or remote tier, which failed or hung and is left alone for a while",
    MatchEnd.NOT_WORTH_LOADING: "the next block is in the disk or remote tier, from where it comes later than it is computed",
    MatchEnd.BEHIND_A_HOLE: "the rest is not shared, or a group of layers lacks what its window reads",
    MatchEnd.OTHER_TENANT: "another tenant, adapter or salt has the next block",
    MatchEnd.NOT_ASKED: "no more was asked for",
    MatchEnd.NOT_LOADED: "the next block is in the host tier and was not loaded",
    MatchEnd.LOADING: "the next block is being loaded",
}


def _end(
    state: PoolState, lookup: PrefixLookup, scope: str, tokens: Int32Array, root: int, last: int, num_matched: int
) -> tuple[MatchEnd, float | None]:
    config = state.config
    if not config.prefix_caching:
        return MatchEnd.CACHING_OFF, None
    if num_matched == len(tokens):
        return MatchEnd.COMPLETE, None
    if len(tokens) - num_matched < config.block_size:
        return MatchEnd.PARTIAL_BLOCK, None
    needed = tokens[: num_matched + config.block_size]
    seqs = state.sequences
    if root and _is_held(seqs, root, needed, seqs.num_committed < len(needed)):
        return MatchEnd.COMPUTING, None
    index = state.index
    if root and len(behind := index.match(last, needed[num_matched:], 1)):
        if not len(lookup.in_time(behind)):
            return MatchEnd.EXPIRED, None
        return MatchEnd.EVICTED, None  # it has left the device, and its copy has not arrived yet
    if state.below is not None:
        num_whole = (len(tokens) - num_matched) // config.block_size * config.block_size
        below = state.below.end_behind(scope, last, tokens[num_matched : num_matched + num_whole].astype("<i4").tobytes())
        if below is not None:
            return below, None
    if not root:
        return MatchEnd.NEVER_STORED, None
    gone = index.eviction_log.last_end(last, needed[num_matched:])
    if gone is not None:
        return gone
    if _is_held(seqs, root, needed, seqs.num_published * config.block_size < len(needed)):
        return MatchEnd.COMPUTING, None  # it is committed, and about to be published
    return MatchEnd.NEVER_STORED, None


def _is_held(seqs: SequenceTable, root: int, needed: Int32Array, which: np.ndarray) -> bool:
    """Whether a sequence that computes, one of those in the mask `which`, has these tokens and will share them."""
    computes = (seqs.states == SequenceState.RUNNING) | (seqs.states == SequenceState.LOADING)
    shares = seqs.share_limits.astype(np.int64) * seqs.block_size >= len(needed)
    slots = np.flatnonzero(computes & shares & which & (seqs.roots == root) & (seqs.num_tokens >= len(needed)))
    if not len(slots):  # as with tokens that are more than a sequence can have
        return False
    start = len(needed) - seqs.block_size
    same = (seqs.tokens.all[slots, start : len(needed)] == needed[start:]).all(axis=1)
    return any(np.array_equal(seqs.tokens.all[slot, :start], needed[:start]) for slot in slots[same].tolist())


def _num_common(index: PrefixIndex, node: int, tokens: Int32Array, block_size: int) -> int:
    """Most leading tokens that a block behind this node has in common with these."""
    children = index.links.children(node, _MAX_CHILDREN) if node and len(tokens) else []
    if not children:
        return 0
    rows = np.array([index.key_tokens(child)[1][: len(tokens)] for child in children])
    differs = rows != tokens
    all_alike = len(tokens) if len(tokens) < block_size else 0  # the very block is there, but cannot be had now
    return int(np.where(differs.any(axis=1), differs.argmax(axis=1), all_alike).max())
