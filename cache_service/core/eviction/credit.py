"""What deviating from LRU has won, and whether it may go on: the bound of what it may lose.

Credit is the number of hits that LRU would not have had, minus those that it would have had in vain, with an income of one
block in a thousand used and at most one whole cache. Where it is spent, the order of LRU is taken, until the income pays for
another try. So a cache that deviates in vain loses a thousandth, and what was won long ago does not pay for losses without end.
Where it is a little below 0, only a block that is worth clearly less than the least recently used one goes before it: a false
alarm costs hits, and a real difference between what returns and what does not is a multiple.

Three things are learned sooner than by wins and losses. While nearly nothing comes back that LRU has, as in a cycle longer than
the cache, nothing can be lost by deviating. Where hits break off that were usual, something new has begun, of which nothing is
known: until more is known, no more may be missing of what LRU has than the credit would cover. And while there are less than
half as many hits as LRU would have, as in a cycle that just fits it, the order is LRU's whatever was won before.
"""

from math import exp, inf

_INCOME = 0.001  # of the blocks used
_CLEARLY_LESS, ANY_DIFFERENCE = 0.4, inf  # of the hit density of the least recently used block
_ALLOWED_REQUESTS, _ALLOWED_SHARE = 1, 1 / 128  # of an average request's blocks and of the cache, that credit may be below 0
_USELESS_SHARE = 0.02  # of the blocks used; where LRU has fewer hits, it is of no use
_USELESS_SPAN = 0.4  # turnovers in which LRU's hits are forgotten: from usual shares to useless takes more than one turnover
_RECENT_SPAN, _USUAL_SPAN = 0.25, 4  # turnovers that recent and usual hits are about
_BROKEN_OFF = 0.25  # of the usual share of hits
_FAR_BEHIND = 0.5  # of the recent share of LRU's hits


class _Share:
    """A share of the blocks used of late; a span is in blocks."""

    def __init__(self, span: float) -> None:
        self._span, self._sum, self._weight = span, 0.0, 0.0

    def count(self, num_used: int, num_hits: int) -> None:
        kept = exp(-num_used / self._span)
        self._sum = kept * self._sum + (1 - kept) * min(1, num_hits / num_used)
        self._weight = kept * self._weight + 1 - kept

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    @property
    def is_whole(self) -> bool:
        """Whether it is about all of its span and more."""
        return self._weight > 1 - _USELESS_SHARE


class Credit:
    """The credit of one cache. Counts are blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._most = num_blocks
        self._credit = 0.0
        self._recent, self._usual = _Share(_RECENT_SPAN * num_blocks), _Share(_USUAL_SPAN * num_blocks)
        self._of_lru, self._recent_of_lru = _Share(_USELESS_SPAN * num_blocks), _Share(_RECENT_SPAN * num_blocks)

    def count(self, num_used: int, num_hits: int, num_lru_hits: int, num_gained: int) -> None:
        """num_gained: hits that LRU would not have had, minus those that it would have had in vain."""
        self._credit = min(self._credit + num_gained + _INCOME * num_used, self._most)
        if num_used:
            self._recent.count(num_used, num_hits)
            self._usual.count(num_used, num_hits)
            self._of_lru.count(num_used, num_lru_hits)
            self._recent_of_lru.count(num_used, num_lru_hits)

    def trust(self, num_missing: int, request_len: float) -> float:
        """The share of the hit density of the least recently used block below which another goes before it; 0 where none does.

        num_missing: blocks that LRU would have and that are evicted.
        """
        if self._of_lru.is_whole and self._of_lru.value < _USELESS_SHARE:
            return ANY_DIFFERENCE
        if self._recent.value < _FAR_BEHIND * self._recent_of_lru.value:
            return 0
        left = self._credit + _ALLOWED_REQUESTS * request_len + _ALLOWED_SHARE * self._most
        has_broken_off = self._recent.value < _BROKEN_OFF * self._usual.value
        if left < (num_missing if has_broken_off else 0):
            return 0
        return ANY_DIFFERENCE if self._credit >= 0 else _CLEARLY_LESS
