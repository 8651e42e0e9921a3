"""How many blocks are to be free before the next step comes, so that it evicts none.

Owns what recent steps wanted. Rule: at most a small share of a pool is freed ahead, so that a small pool keeps what it caches.
"""

from math import ceil

_SHARE = 64  # of a pool's blocks, at most one in so many is freed ahead
_FORGETTING = 1 / 64  # a step


class RoomAhead:
    """The wishes of one pool's steps."""

    def __init__(self, num_usable_blocks: int) -> None:
        self._most = num_usable_blocks // _SHARE
        self._wanted = 0.0

    def note_step(self, num_blocks: int) -> None:
        """A step wanted so many free blocks."""
        self._wanted = max(num_blocks, self._wanted * (1 - _FORGETTING))

    @property
    def num_blocks(self) -> int:
        """As many as the greediest of the recent steps wanted, as far as the share goes."""
        return min(ceil(self._wanted), self._most)
