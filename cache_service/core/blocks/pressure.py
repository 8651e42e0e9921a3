"""How full a pool is, in four levels, with hysteresis: a level is entered at its ratio and left 0.05 below it.

Owns the level and the count of its changes. Rule: a pool without used blocks is LOW, whatever the ratios are.
"""

from collections.abc import Callable

from ..values.errors import InvalidField
from ..values.types import PressureLevel

HYSTERESIS = 0.05
_LOWEST, _HIGHEST = int(PressureLevel.LOW), int(PressureLevel.CRITICAL)
_ROUNDING = 1e-9  # 0.8 - 0.05 is less than 0.75


class PressureGauge:
    """The pressure level of one pool. on_change is called with each new level."""

    def __init__(self, ratios: tuple[float, ...], num_usable_blocks: int) -> None:
        """ratios: the shares of the usable blocks at which medium, high and critical begin. Raises InvalidField."""
        medium, high, critical = ratios if len(ratios) == 3 else (0.0, 0.0, 0.0)
        if not 0 < medium <= high <= critical <= 1:
            raise InvalidField("three shares above 0 and up to 1, in ascending order", field="pressure_levels", limit=1)
        self.level = PressureLevel.LOW
        self.num_changes = 0
        self.on_change: Callable[[PressureLevel], None] | None = None
        self._enter = (0.0, 0.0, *(ratio * num_usable_blocks - _ROUNDING for ratio in ratios))  # by level, from 1 on
        self._leave = (0.0, 0.0, *((ratio - HYSTERESIS) * num_usable_blocks + _ROUNDING for ratio in ratios))

    def update(self, num_used: int) -> PressureLevel:
        """The level for num_used blocks that are neither free nor evictable."""
        level = before = int(self.level)
        while level < _HIGHEST and num_used >= self._enter[level + 1]:
            level += 1
        while level > _LOWEST and (num_used <= self._leave[level] or not num_used):
            level -= 1
        if level != before:
            self.level = PressureLevel(level)
            self.num_changes += 1
            if self.on_change is not None:
                self.on_change(self.level)
        return self.level
