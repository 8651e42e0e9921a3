"""The unused blocks, as a stack in one array.

Owns the ids on the stack and nothing else. Taking and putting back are slices, so a step that needs a thousand blocks costs
two array operations; a linked list or a Python set would cost a thousand.
"""

import numpy as np

from ..values.types import Int32Array


class FreeList:
    """A stack of block ids. The last block put back is the first taken, so a small working set stays small."""

    def __init__(self, num_blocks: int) -> None:
        """Holds blocks 1 to num_blocks - 1; block 0 is the null block and never enters."""
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._size = num_blocks - 1

    def __len__(self) -> int:
        return self._size

    def take_blocks(self, count: int) -> Int32Array:
        """[count] ids, in the order of the stack."""
        assert 0 <= count <= self._size, "took more blocks than are free"
        self._size -= count
        return self._stack[self._size : self._size + count][::-1].copy()

    def take_out(self, blocks: Int32Array) -> None:
        """Takes these ids off the stack, wherever they are on it."""
        leaves = np.zeros(len(self._stack), np.bool_)
        leaves[blocks] = True
        stays = self.ids()[~leaves[self.ids()]]
        self._stack[: len(stays)] = stays
        self._size = len(stays)

    def put_blocks(self, blocks: Int32Array) -> None:
        """Puts back distinct ids that are not on the stack."""
        end = self._size + len(blocks)
        assert end < len(self._stack), "put back more blocks than there are"
        self._stack[self._size : end] = blocks
        self._size = end

    def ids(self) -> Int32Array:
        """The ids on the stack, for audits."""
        return self._stack[: self._size]
