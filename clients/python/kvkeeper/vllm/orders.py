"""What the scheduler sends to the workers in one step of vLLM: values that vLLM carries, within its own processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class Scope(NamedTuple):
    """With what a request's tokens say what its K and V are; as the cache service's calls name it."""

    adapter: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Fill vLLM's blocks block_ids with those of a prefix from its block first_block on. token_ids: of whole blocks, from 0."""

    request_id: str
    scope: Scope
    token_ids: TokenIds
    first_block: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Keep vLLM's blocks block_ids, which hold token_ids from the first one on."""

    request_id: str
    scope: Scope
    token_ids: TokenIds
    block_ids: Sequence[int]


@dataclass(slots=True)
class Orders:
    """The orders of one step.

    held: requests that have ended, whose blocks vLLM holds until their stores are reported. preempted: requests whose blocks
    vLLM takes back now.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
