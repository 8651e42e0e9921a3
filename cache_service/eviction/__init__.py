"""Which cached block is forgotten first: one small interface, an implementation per file, chosen by name."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cache_service.errors import InvalidField
from cache_service.eviction.lru import LruPolicy
from cache_service.types import Int32Array

IsEvictable = Callable[[Int32Array], npt.NDArray[np.bool_]]


class EvictionPolicy(Protocol):
    """Orders the evictable blocks. Told what becomes evictable; asks `is_evictable` about what no longer is."""

    def add(self, blocks: Int32Array) -> None:
        """These became evictable now, leaves before parents."""

    def take(self, count: int) -> Int32Array:
        """The first count victims (the pool has at least so many), which are evictable no more."""

    def waiting(self) -> Int32Array:
        """All evictable blocks in the order of eviction, for audits."""


_POLICIES: dict[str, Callable[[int, IsEvictable], EvictionPolicy]] = {"lru": LruPolicy}


def make_policy(name: str, num_blocks: int, is_evictable: IsEvictable) -> EvictionPolicy:
    """Raises InvalidField for a name that is none of the policies'."""
    if name not in _POLICIES:
        raise InvalidField(f"unknown eviction policy {name!r}", field="eviction_policy", limit=", ".join(_POLICIES))
    return _POLICIES[name](num_blocks, is_evictable)
