"""The order in which cached blocks are evicted.

Owns the interface of a policy (policy), the policies and their queues, and make_policy, which finds a policy by its name. Knows
block ids and tokens, no sequences and no tree. May import core.values.
"""

from collections.abc import Callable

from ..values.errors import InvalidField
from .adaptive import AdaptivePolicy
from .keyed import LfuPolicy, LongestFirstPolicy, PriorityPolicy
from .lru import LruPolicy
from .policy import EvictionPolicy, Use

__all__ = ["POLICY_NAMES", "EvictionPolicy", "Use", "make_policy"]

_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "adaptive": AdaptivePolicy,
    "lfu": LfuPolicy,
    "longest_first": LongestFirstPolicy,
    "lru": LruPolicy,
    "priority": PriorityPolicy,
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """A new policy of this name. Raises InvalidField for a name that no policy has."""
    if name not in _POLICIES:
        raise InvalidField(f"unknown eviction policy {name!r}", field="eviction_policy", limit=", ".join(_POLICIES))
    return _POLICIES[name](num_blocks)
