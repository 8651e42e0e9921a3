"""The memory in which an index is written down, so that a later run of the service finds it: arrays and the tenants' names.

Whoever made the memory hands it in. The core reads and writes it, and knows nothing of files.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .types import Int32Array

UInt64Array = npt.NDArray[np.uint64]

_HEAD_WORDS = 4  # two numbers of 64 bits: the node's name and its parent's


def row_words(block_size: int) -> int:
    """int32 words of one row: the names of a block's node and of its parent, and the block's tokens."""
    return _HEAD_WORDS + block_size


@dataclass(frozen=True, slots=True)
class KeptIndex:
    """One row and one check for each block of a pool.

    key: drawn with the memory, so that rows of other memory are not believed. checks [num_blocks], 0 for a row that says
    nothing. rows [num_blocks, row_words]. tenants: those of earlier runs, in the order of their roots. add_tenant(name) stores
    one more, for good, before it returns.
    """

    key: int
    checks: UInt64Array
    rows: Int32Array
    tenants: tuple[str, ...]
    add_tenant: Callable[[str], None]
