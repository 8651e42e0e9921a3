"""Why tokens were missed, by the reference model: block by block, from whole prefixes and what became of each.

The order of causes is the protocol's. For whose need a block was evicted, and how long ago, is for tests by hand.
"""

from collections import Counter
from typing import TYPE_CHECKING

from kvkeeper.cache_service.core.values.types import MatchEnd

if TYPE_CHECKING:
    from tests.support.reference.naive_cache import Key, NaiveCache, NaiveSequence


class NaiveMisses:
    """tokens: missed, by tenant and cause."""

    def __init__(self) -> None:
        self.tokens: Counter[tuple[str, MatchEnd]] = Counter()
        self.gone: dict[Key, MatchEnd] = {}  # the last cause for which each prefix left the index
        self._beginnings: dict[tuple[int, ...], str] = {}  # the scope that asked last, and found nothing

    def note(self, cache: "NaiveCache", q: "NaiveSequence", max_hit: int, num_hits: int) -> None:
        """A start has looked its tokens up, and found so many blocks; nothing was taken yet."""
        size, cached = cache.block_size, len(cache.match(q.scope, q.tokens))
        sharers = [other for other in cache.holders if other.running and other is not q and other.scope == q.scope]
        behind: list[int] = []  # blocks that no reason of before explains
        for block_idx in range(num_hits, cache.num_blocks(len(q.tokens))):
            end = (block_idx + 1) * size
            if end > len(q.tokens) - 1:
                cause = MatchEnd.PARTIAL_BLOCK
            elif block_idx >= cache.num_shareable(q):
                cause = MatchEnd.BEHIND_A_HOLE
            elif end > max_hit:
                cause = MatchEnd.NOT_ASKED
            elif block_idx < cached:
                cause = MatchEnd.BELOW_MINIMUM
            elif any(block_idx < cache.num_shareable(other) and other.tokens[:end] == q.tokens[:end] for other in sharers):
                cause = MatchEnd.COMPUTING
            else:
                behind.append(block_idx)
                continue
            self.tokens[q.scope.partition("\0")[0], cause] += min(end, len(q.tokens)) - block_idx * size
        of_other = self._others(cache, q) if behind and not cached else 0
        for block_idx in behind:
            cause = self.gone.get(cache.key(q, block_idx), MatchEnd.NEVER_STORED)
            if cause is MatchEnd.NEVER_STORED and block_idx < of_other:
                cause = MatchEnd.OTHER_TENANT
            self.tokens[q.scope.partition("\0")[0], cause] += size

    def _others(self, cache: "NaiveCache", q: "NaiveSequence") -> int:
        beginning = tuple(q.tokens[: cache.block_size])
        other = self._beginnings.get(beginning, q.scope)
        self._beginnings[beginning] = q.scope
        return 0 if other == q.scope else len(cache.match(other, q.tokens))
