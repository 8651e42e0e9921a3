"""TierChain: the tiers below the host tier, one behind the other; a sequence waits for one after the other.

The next tier is looked at once the one before has brought what it had, so that it is asked only for what is behind that.
"""

from typing import Any

import numpy as np

from ...pool_state import PoolState
from ...values.kv_spec import WHOLE
from ...values.types import Int32Array, MatchEnd, Tier
from .named_tier import NamedTier


class TierChain:
    """The nearest tier first."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self.tiers: list[NamedTier] = []
        self._turns: dict[int, int] = {}  # by slot of a sequence that was created: which tier it waits for

    def expect(self, slot: int) -> None:
        """A sequence was created in this slot: what it wants is brought, as far as the tiers have it."""
        self._turns[slot] = -1
        self._go_on(slot)

    def length_to_come(self, slot: int, max_hit: int) -> int:
        """Tokens that the waiting sequence could hit once what it waits for has come; 0 where it is not to wait."""
        if not max_hit:
            return 0
        while slot in self._turns:
            length = self.tiers[self._turns[slot]].length_to_come(slot, max_hit)
            if length:
                return length
            self._go_on(slot)
        return 0

    def end_behind(self, tenant: str, node: int, tokens: bytes) -> MatchEnd | None:
        """Why a block of these tokens behind this node is in no tier above, where one is known to have it."""
        ends = (tier.end_behind(tenant, node, tokens) for tier in self.tiers)
        return next((end for end in ends if end is not None), None)

    def tiers_behind(self, tenant: str, tokens: Int32Array, nodes: Int32Array) -> list[Tier]:
        """[n] the nearest tier of each block of a prompt behind these nodes, as far as all are known to be in one.

        With several groups of layers as far as one tier and those above it have all that a hit reads.
        """
        if self._state.config.group_spans != (WHOLE,):
            found: list[Tier] = []
            for tier in self.tiers:
                found += [tier.tier] * (tier.end_of(tenant, tokens) - len(nodes) - len(found))
            return found
        names, below, width = self._state.block_names, self._state.below_blocks, 4 * self._state.config.block_size
        raw = tokens[len(nodes) * self._state.config.block_size :].astype("<i4").tobytes()
        name, found = names.of(int(nodes[-1])) if len(nodes) else names.first(tenant), []
        for at in range(0, len(raw) - width + 1, width):
            name = names.child(name, raw[at : at + width])
            of_block = below.tier_of(name)
            if of_block is None:
                break
            found.append(of_block)
        return found

    def may_ask(self) -> bool:
        """Whether one of them may have more than is known: it would have to be asked."""
        return any(tier.rules.most_asked for tier in self.tiers)

    def begin_clearing(self) -> None:
        self._turns.clear()
        for tier in self.tiers:
            tier.begin_clearing()

    def end_clearing(self) -> None:
        for tier in self.tiers:
            tier.end_clearing()

    def stats(self) -> dict[str, Any]:
        return {name: number for tier in self.tiers for name, number in tier.stats().items()}

    def host_ends(self) -> tuple[Int32Array, Int32Array]:
        """Host blocks, one entry for each order that has an end there, and those of them that are being filled."""
        ends = [tier.host_ends() for tier in self.tiers]
        return np.concatenate([all_ends for all_ends, _ in ends]), np.concatenate([fills for _, fills in ends])

    def check(self) -> list[str]:
        return [text for tier in self.tiers for text in tier.check()]

    def _go_on(self, slot: int) -> None:
        """The next tier that has something for the sequence, if any."""
        for turn in range(self._turns[slot] + 1, len(self.tiers)):
            self._turns[slot] = turn
            if self.tiers[turn].expect(slot):
                return
        del self._turns[slot]
