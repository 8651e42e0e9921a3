"""Where stored projections go: into matrices that several of them are together, and which part of each is a rank's."""

from collections.abc import Iterator, Sequence

from kvkeeper.kernels.types import LinearWeight

from .checkpoint.destination import ALL, Destination, Empty, take_all
from .experts import Weight


def empty_projection(empty: Empty, num_out: int, num_in: int, bias: bool) -> LinearWeight:
    """One that destinations fill."""
    return LinearWeight(empty(num_out, num_in), empty(num_out) if bias else None)


def row_places(own: range) -> tuple[tuple[slice, ...], ...]:
    """The places of a rank's rows in a stored tensor."""
    return ((slice(own.start, own.stop),),)


def whole_range(size: int) -> tuple[int, range]:
    """A size, and all of it."""
    return size, range(size)


def scaled(heads: range, head_dim: int) -> range:
    """The rows of these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def by_outputs(fused: Weight, parts: Sequence[tuple[str, int, range]], fused_name: str) -> Iterator[tuple[str, Destination]]:
    """Weights, and biases where there are, of projections that lie in one matrix one after the other.

    Args:
        parts: of each its name, its outputs, and those of the rank.
        fused_name: where they are stored as one, too; empty: they are not.
    """
    assert isinstance(fused, LinearWeight), "weights are quantised when all are read"
    for kind, whole in (("weight", fused.data), ("bias", fused.bias)):
        if whole is None:
            continue
        if fused_name:
            num_rows, places = 0, []
            for _, size, own in parts:
                places.append((slice(num_rows + own.start, num_rows + own.stop),))
                num_rows += size
            yield f"{fused_name}.{kind}", Destination(whole, (num_rows, *whole.shape[1:]), places=tuple(places))
            continue
        for (name, size, own), part in zip(parts, whole.split([len(own) for _, _, own in parts]), strict=True):
            yield f"{name}.{kind}", Destination(part, (size, *part.shape[1:]), places=row_places(own))


def by_inputs(weight: Weight | None, name: str, num_inputs: int, own: range) -> Iterator[tuple[str, Destination]]:
    """A weight with its inputs of the rank, and its bias, where it has one, whole."""
    assert isinstance(weight, LinearWeight), "weights are quantised when all are read"
    yield (
        f"{name}.weight",
        Destination(weight.data, (len(weight.data), num_inputs), places=((*ALL, slice(own.start, own.stop)),)),
    )
    if weight.bias is not None:
        yield f"{name}.bias", take_all(weight.bias)
