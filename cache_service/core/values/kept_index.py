"""The memory in which an index is written down, so that a later run of the service finds it: tables and the tenants' names.

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

    tenants: those of earlier runs, in the order of their roots. add_tenant(name) counts one more for good before it returns,
    and stores its name. num_nameless: tenants of earlier runs whose names are not known; what they had may lie in any block.
    """

    device: KeptTable
    hosts: KeptTable | None
    tenants: tuple[str, ...]
    add_tenant: Callable[[str], None]
    num_nameless: int = 0


@dataclass(frozen=True, slots=True)
class Verification:
    """How what an earlier run has left is compared with the digests in its rows.

    digest: of what the blocks hold now. num_sampled: blocks to begin with, 0 for all. seed: of the choice among them.
    """

    digest: Digest
    num_sampled: int
    seed: int
