"""Groups of layers: which layers of a model keep their K and V, or their states, in one block.

Owns the choice. Each group has layers of one window and of one shape of K and V, and groups take about equally much room,
because blocks of all groups have one size: what a smaller group leaves of its blocks is wasted. Layers with states come in as
few groups as fit the blocks of the layers that keep all tokens. Pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .checkpoint.errors import UnsupportedModelError

# Each has a table of every sequence, which a step has to handle: of 16 growing sequences the core's took 1.3 ms with 12 groups
# and 6.3 ms with 40, on a busy processor. With a layer of states in each, beside the full ones, blocks may be small.
_MOST_GROUPS = 40
_USUAL_GROUPS = 12  # more of them have to save a tenth of the room
_FULL_WEIGHT = 16  # of a layer that keeps all tokens, against one that keeps a window
Heads = tuple[int, int]  # KV heads of a layer, and the size of each


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that may share a block. slot: elements of a token's keys in one of them."""

    window: int | None
    heads: Heads
    layers: tuple[int, ...]

    @property
    def slot(self) -> int:
        return self.heads[0] * self.heads[1]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Numbers of layers, ascending. window: tokens that each token reads in them, itself included; None: all.

    is_chunked: instead it reads those of its chunk of so many.
    state_bytes: of the states of its layers, which are kept instead of tokens; 0: tokens are. checkpoint_blocks: of so many
    blocks one is kept with the states at its end.
    num_kv_heads, head_dim: of its layers, where the model's layers differ in them; else 0.
    """

    layers: tuple[int, ...]
    window: int | None
    is_chunked: bool = False
    state_bytes: int = 0
    checkpoint_blocks: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0

    @property
    def is_recurrent(self) -> bool:
        return self.state_bytes > 0


def group_layers(
    windows: Sequence[int | None], chunks: Sequence[int | None] = (), heads: Sequence[Heads] = ()
) -> tuple[LayerGroup, ...]:
    """The groups of a model with these windows or chunks of its layers, full ones first; () where one table serves as well.

    That is so without full layers, because the cache finds prefixes by them, and without windows and chunks.
    chunks: () where no layer has any; else those count, and no layer has a window.
    heads: of each layer; () where all have the same. Raises UnsupportedModelError where blocks of one size do not fit them all.
    """
    has_chunks = any(chunks)
    reach = chunks if has_chunks else windows
    members: dict[tuple[int | None, Heads], list[int]] = {}
    for layer, window in enumerate(reach):
        members.setdefault((window, heads[layer] if heads else (1, 1)), []).append(layer)
    kinds = [_Kind(*key, tuple(layers)) for key, layers in members.items()]
    kinds.sort(key=lambda kind: (kind.window or 0, kind.heads))  # full ones are first
    if not kinds or kinds[0].window is not None or len(kinds) == 1:
        return ()
    sizes = {kind.slot * count for kind in kinds for count in range(1, len(kind.layers) + 1)}
    costs = {size: cost for size in sizes if (cost := _cost(kinds, size)) is not None}
    if not costs:
        raise UnsupportedModelError("heads of K and V", [kind.heads for kind in kinds], "heads that fill blocks of one size")
    room = min(costs, key=lambda size: (costs[size], -size))
    return tuple(
        LayerGroup(layers, kind.window, has_chunks and kind.window is not None, 0, 0, *(kind.heads if heads else (0, 0)))
        for kind in kinds
        for layers in _cut(kind, room)
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
    least = -(-len(ordered) // (_MOST_GROUPS - 1))
    if size < least:
        fits = -(-least * state_bytes // (len(full) * token_bytes))
        raise UnsupportedModelError("--block-size", block_size, f"{fits} or more: a block holds a state of {least} layers")
    size = -(-len(ordered) // -(-len(ordered) // size))  # about equally many in each
    groups = (tuple(ordered[first : first + size]) for first in range(0, len(ordered), size))
    return (
        LayerGroup(full, None),
        *(LayerGroup(each, None, False, len(each) * state_bytes, checkpoint_blocks) for each in groups),
    )


def _cut(kind: _Kind, size: int) -> list[tuple[int, ...]]:
    """The layers of a kind, as many in each group as its blocks have room for."""
    count = size // kind.slot
    return [kind.layers[first : first + count] for first in range(0, len(kind.layers), count)]


def _cost(kinds: Sequence[_Kind], size: int) -> float | None:
    """Room of a long sequence in blocks of so many elements, unused room included; where it keeps all tokens it counts more.

    None: such blocks do not hold a layer of each kind, and whole tokens of all, in few enough groups.
    """
    if any(kind.slot > size or 2 * size % kind.slot for kind in kinds):
        return None
    counts = [len(_cut(kind, size)) for kind in kinds]
    if sum(counts) > _MOST_GROUPS:
        return None
    weighed = sum(count * (1 if kind.window else _FULL_WEIGHT) for kind, count in zip(kinds, counts, strict=True))
    return size * weighed * (1.0 if sum(counts) <= _USUAL_GROUPS else 1 / 0.9)


def find_places(groups: Sequence[LayerGroup]) -> tuple[tuple[int, int], ...]:
    """The place of each layer: its group, and which layer of the group's blocks it is."""
    places = {layer: (group_idx, at) for group_idx, group in enumerate(groups) for at, layer in enumerate(group.layers)}
    return tuple(places[layer] for layer in range(len(places)))
