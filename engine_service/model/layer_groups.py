"""Groups of layers: which layers of a model keep their K and V, or their states, in one block.

Owns the choice. Each group has layers of one window, and about equally many, because blocks of all groups have one size: what a
smaller group leaves of its blocks is wasted. Layers with states come in as few groups as fit the blocks of the layers that keep
all tokens. Pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .checkpoint.errors import UnsupportedModelError

_MOST_GROUPS = 12  # each has a table of every sequence, which a step has to handle
# With a layer of states in each, beside the full ones: blocks may be small then, and a step costs the more. Of 16 growing
# sequences the core's took 1.3 ms with 12 groups and 6.3 ms with 40, on a busy processor.
_MOST_STATE_GROUPS = 40
_FULL_WEIGHT = 16  # of a layer that keeps all tokens, against one that keeps a window
_Kinds = Sequence[tuple[int | None, list[int]]]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Numbers of layers, ascending. window: tokens that each token reads in them, itself included; None: all.

    is_chunked: instead it reads those of its chunk of so many.
    state_bytes: of the states of its layers, which are kept instead of tokens; 0: tokens are. checkpoint_blocks: of so many
    blocks one is kept with the states at its end.
    """

    layers: tuple[int, ...]
    window: int | None
    is_chunked: bool = False
    state_bytes: int = 0
    checkpoint_blocks: int = 0

    @property
    def is_recurrent(self) -> bool:
        return self.state_bytes > 0


def group_layers(windows: Sequence[int | None], chunks: Sequence[int | None] = ()) -> tuple[LayerGroup, ...]:
    """The groups of a model with these windows or chunks of its layers, full ones first; () where one table serves as well.

    That is so without full layers, because the cache finds prefixes by them, and without windows and chunks.
    chunks: () where no layer has any; else those count, and no layer has a window.
    """
    has_chunks = any(chunks)
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(chunks if has_chunks else windows):
        by_window.setdefault(window, []).append(layer)
    if None not in by_window or len(by_window) == 1:
        return ()
    kinds = sorted(by_window.items(), key=lambda kind: kind[0] or 0)  # the full one is first
    sizes = range(1, max(map(len, by_window.values())) + 1)
    size = min(
        (each for each in sizes if _num_groups(kinds, each) <= _MOST_GROUPS), key=lambda each: (_cost(kinds, each), -each)
    )
    return tuple(
        LayerGroup(tuple(layers[first : first + size]), window, has_chunks and window is not None)
        for window, layers in kinds
        for first in range(0, len(layers), size)
    )


def group_states(
    recurrent: Collection[int], num_layers: int, state_bytes: int, token_bytes: int, block_size: int, checkpoint_blocks: int
) -> tuple[LayerGroup, ...]:
    """The group of the layers that keep all tokens, and behind it those of the recurrent ones.

    Args:
        state_bytes: of one layer.
        token_bytes: K and V of a token in one layer that keeps all.
    """
    full = tuple(layer for layer in range(num_layers) if layer not in recurrent)
    ordered, block_bytes = sorted(recurrent), len(full) * token_bytes * block_size
    size = min(len(ordered), block_bytes // state_bytes)
    least = -(-len(ordered) // (_MOST_STATE_GROUPS - 1))
    if size < least:
        fits = -(-least * state_bytes // (len(full) * token_bytes))
        raise UnsupportedModelError("--block-size", block_size, f"{fits} or more: a block holds a state of {least} layers")
    size = -(-len(ordered) // -(-len(ordered) // size))  # about equally many in each
    groups = (tuple(ordered[first : first + size]) for first in range(0, len(ordered), size))
    return (
        LayerGroup(full, None),
        *(LayerGroup(each, None, False, len(each) * state_bytes, checkpoint_blocks) for each in groups),
    )


def _num_groups(kinds: _Kinds, size: int) -> int:
    return sum(-(-len(layers) // size) for _, layers in kinds)


def _cost(kinds: _Kinds, size: int) -> int:
    """Room of a long sequence in layers, unused room included; where it keeps all tokens it counts more."""
    return sum(-(-len(layers) // size) * size * (1 if window else _FULL_WEIGHT) for window, layers in kinds)


def find_places(groups: Sequence[LayerGroup]) -> tuple[tuple[int, int], ...]:
    """The place of each layer: its group, and which layer of the group's blocks it is."""
    places = {layer: (group_idx, at) for group_idx, group in enumerate(groups) for at, layer in enumerate(group.layers)}
    return tuple(places[layer] for layer in range(len(places)))
