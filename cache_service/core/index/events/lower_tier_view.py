"""The blocks below the host tier alone that were reported to watches.

Owns the reported blocks, each with its tier, and those to be looked at. Rules: a block is reported while a tier below has it
and it can be reached: it is the first of a prompt, or the block before it is reported, here or as one of the index. So it comes
after its parent, and goes with it. A look compares what was reported with what is so now, so it may come late, and too often. A
block that comes or goes has the blocks behind it looked at, so that no look walks far.
"""

from ...values.types import EventKind, Tier
from ..below_blocks import BelowBlocks
from .watch import Watch


class LowerTierView:
    """The blocks reported to one watch, or to several of one scope whose snapshots are complete."""

    def __init__(self, root_name: bytes, below: BelowBlocks, above: dict[bytes, int]) -> None:
        """root_name: what the scope's first blocks are behind. above: the names of reported nodes, each with its root."""
        self.readers: list[Watch] = []
        self.root_name = root_name
        self.root = 0  # in the index, while the scope has one there
        self._below, self._above = below, above
        self._reported: dict[bytes, Tier] = {}
        self._wanted: dict[bytes, None] = {}  # to be looked at: reported, or below and reached; none twice
        self._doubted: list[bytes] = []  # to be looked at: reported before a tier was cleared

    @property
    def has_work(self) -> bool:
        return bool(self._wanted or self._doubted)

    def want_behind(self, name: bytes) -> None:
        """What is behind this block, or behind the root, is to be looked at."""
        self._wanted.update(dict.fromkeys(self._below.children(name)))

    def changed(self, name: bytes) -> None:
        """A tier below gained or lost this block."""
        block = self._below.find(name)
        if name in self._reported or (block is not None and self._is_reached(block.parent)):
            self._wanted[name] = None
        else:
            self._wanted.pop(name, None)

    def cleared(self) -> None:
        """A tier below lost all that it had."""
        self._doubted = list(self._reported)

    def came_above(self, name: bytes) -> bool:
        """This block is in the index now. Returns whether it was reported here until now."""
        return self._reported.pop(name, None) is not None

    def left_above(self, name: bytes) -> None:
        """A reported node of this name left the index: it moved to a tier below, or is removed."""
        block = self._below.find(name)
        if block is not None and self._is_reached(block.parent):
            self._reported[name] = block.tier
            self._report(EventKind.TIER_CHANGED, name, block.tier)
        else:
            self._report(EventKind.REMOVED, name)
            self.want_behind(name)

    def look(self, new: EventKind) -> None:
        """Looks at one block. new: the kind of event for one that is new to the readers."""
        name = self._wanted.popitem()[0] if self._wanted else self._doubted.pop()
        if self._above.get(name) == self.root:
            return
        block, reported = self._below.find(name), self._reported.get(name)
        if block is not None and self._is_reached(block.parent):
            if reported is None:
                self._report(new, name, block.tier, block.parent, block.tokens)
                self.want_behind(name)
            elif reported is not block.tier:
                self._report(EventKind.TIER_CHANGED, name, block.tier)
            self._reported[name] = block.tier
        elif reported is not None:
            del self._reported[name]
            self._report(EventKind.REMOVED, name)
            self.want_behind(name)

    def _is_reached(self, parent: bytes) -> bool:
        return parent == self.root_name or parent in self._reported or (self.root != 0 and self._above.get(parent) == self.root)

    def _report(self, kind: EventKind, name: bytes, tier: Tier | None = None, parent: bytes = b"", tokens: bytes = b"") -> None:
        for reader in self.readers:
            reader.report(kind, name, tier, parent, tokens)
