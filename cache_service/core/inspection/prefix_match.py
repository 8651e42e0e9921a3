"""How much of a prompt is cached, by tier, as far as that is known without asking a disk or a server. Changes nothing."""

from typing import NamedTuple

import numpy as np

from ..pool_state import PoolState
from ..tables.prefix_lookup import PrefixLookup
from ..values.types import Int32Array, Tier


class Behind(NamedTuple):
    """Tokens of a prompt behind what the device and the host tier have; whole blocks."""

    num_disk: int = 0
    num_remote: int = 0
    remote_not_asked: bool = False  # it may have more behind them


NOTHING_BEHIND = Behind()


class PrefixMatch(NamedTuple):
    """The longest cached prefix, in whole blocks. blocks [n]: of those on the device or, 0, in the host tier only.

    num_tokens: in any tier; num_host: of them in the host tier only.
    """

    blocks: Int32Array
    num_tokens: int
    num_host: int
    behind: Behind


def match_prefix(state: PoolState, lookup: PrefixLookup, scope: str, tokens: Int32Array) -> PrefixMatch:
    """In any tier. tokens [1 or more]."""
    size = state.config.block_size
    nodes = lookup.usable(lookup.match_prompt(scope, tokens))
    blocks = state.index.block_of_node[nodes]
    behind = tiers_behind(state, scope, tokens, nodes)
    num_tokens = len(nodes) * size + behind.num_disk + behind.num_remote
    return PrefixMatch(blocks, num_tokens, int(np.count_nonzero(blocks == 0)) * size, behind)


def tiers_behind(state: PoolState, scope: str, tokens: Int32Array, nodes: Int32Array) -> Behind:
    """What lies below the host tier behind these nodes, which a prompt of these tokens matches."""
    if state.below is None or not state.config.prefix_caching:
        return NOTHING_BEHIND
    size = state.config.block_size
    tiers = state.below.tiers_behind(scope, tokens, nodes)
    is_short = len(nodes) + len(tiers) < len(tokens) // size
    return Behind(tiers.count(Tier.DISK) * size, tiers.count(Tier.REMOTE) * size, is_short and state.below.may_ask())
