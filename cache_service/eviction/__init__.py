"""Which cached block is forgotten first: one small interface, chosen by name."""

from collections.abc import Callable

from cache_service.errors import InvalidField
from cache_service.eviction.adaptive import AdaptivePolicy
from cache_service.eviction.fifo import ClockPolicy, FifoPolicy
from cache_service.eviction.keyed import LfuPolicy, LongestFirstPolicy, PriorityPolicy
from cache_service.eviction.lru import LruPolicy
from cache_service.eviction.policy import EvictionPolicy, Use

__all__ = ["POLICY_NAMES", "EvictionPolicy", "Use", "make_policy"]

_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "adaptive": AdaptivePolicy,
    "clock": ClockPolicy,
    "fifo": FifoPolicy,
    "lfu": LfuPolicy,
    "longest_first": LongestFirstPolicy,
    "lru": LruPolicy,
    "priority": PriorityPolicy,
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """Raises InvalidField for a name that is none of the policies'."""
    if name not in _POLICIES:
        raise InvalidField(f"unknown eviction policy {name!r}", field="eviction_policy", limit=", ".join(_POLICIES))
    return _POLICIES[name](num_blocks)
