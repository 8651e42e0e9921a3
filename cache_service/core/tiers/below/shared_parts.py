"""SharedParts: what the questions, loads and stores of one tier all work on."""

from dataclasses import dataclass

from ...pool_state import PoolState
from ..host_tier import HostTier
from .content_names import ContentNames
from .group_loads import GroupLoads
from .in_flight import InFlight
from .tier_orders import Table, TierRules
from .worth import TierWorth


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Of one tier. groups: None where all layers are of one group."""

    state: PoolState
    host: HostTier
    names: ContentNames
    groups: GroupLoads | None
    table: Table
    rules: TierRules
    worth: TierWorth
    flight: InFlight
