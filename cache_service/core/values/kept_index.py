"""The memory in which an index is written down, so that a later run of the service finds it: tables and the scopes of roots.

The maker of the memory hands it in. The core reads and writes it, and knows nothing of files.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .types import Int32Array, Tier

UInt64Array = npt.NDArray[np.uint64]
Digest = Callable[[Tier, Int32Array], UInt64Array]  # [n] digests of what n blocks of a tier hold, none of them 0

_HEAD_WORDS = 6  # three numbers of 64 bits: the node's name, its parent's, and the digest


def row_words(block_size: int) -> int:
    """int32 words of one row: the names of a block's node and of its parent, a digest or 0, and the block's tokens."""
    return _HEAD_WORDS + block_size


@dataclass(frozen=True, slots=True)
class KeptTable:
    """One row and one check for each block of a tier.

    key: drawn with the memory, so that rows of other memory are not believed. checks [num_blocks], 0 for a row that says
    nothing. rows [num_blocks, row_words].
    """

    key: int
    checks: UInt64Array
    rows: Int32Array


@dataclass(frozen=True, slots=True)
class KeptIndex:
    """device, hosts: the table of each tier, where there is one.

    scopes: of the roots of earlier runs, in their order; None where one is not known. note_root(root, scope): a root more,
    which is counted for good before this returns, and whose scope is stored; or a root that is of another scope from now on,
    unless False is returned. num_nameless: roots of earlier runs whose scopes are not known; what they had may lie anywhere.
    """

    device: KeptTable
    hosts: KeptTable | None
    scopes: tuple[str | None, ...]
    note_root: Callable[[int, str], bool]
    num_nameless: int = 0


@dataclass(frozen=True, slots=True)
class Verification:
    """How what an earlier run has left is compared with the digests in its rows.

    digest: of what the blocks hold now. num_sampled: blocks to begin with, 0 for all. seed: of the choice among them.
    """

    digest: Digest
    num_sampled: int
    seed: int
