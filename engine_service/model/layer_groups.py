"""Groups of layers: which layers of a model keep their K and V in one block, by the windows that the layers have.

Owns the choice. Each group has layers of one window, and about equally many, because blocks of all groups have one size: what a
smaller group leaves of its blocks is wasted. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_WASTE = 8  # at most one layer in so many is room that no layer uses
_MOST_GROUPS = 64


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Numbers of layers, ascending. window: tokens that each token reads in them, itself included; None: all."""

    layers: tuple[int, ...]
    window: int | None


def group_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """The groups of a model with these windows of its layers, full ones first; () where one table serves as well.

    That is so without full layers, because the cache finds prefixes by them, and without windows.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    if None not in by_window or len(by_window) == 1:
        return ()
    kinds = sorted(by_window.items(), key=lambda kind: kind[0] or 0)  # the full one is first
    for size in range(min(map(len, by_window.values())), 0, -1):
        groups = tuple(
            LayerGroup(tuple(layers[first : first + size]), window)
            for window, layers in kinds
            for first in range(0, len(layers), size)
        )
        num_wasted = len(groups) * size - len(windows)
        if len(by_window[None]) % size == 0 and num_wasted * _MOST_WASTE <= len(windows):
            return groups if len(groups) <= _MOST_GROUPS else ()
    raise AssertionError("groups of one layer waste nothing")


def places_of(groups: Sequence[LayerGroup]) -> tuple[tuple[int, int], ...]:
    """Of each layer, its group and which layer of the group's blocks it is."""
    places = {layer: (group_idx, at) for group_idx, group in enumerate(groups) for at, layer in enumerate(group.layers)}
    return tuple(places[layer] for layer in range(len(places)))
