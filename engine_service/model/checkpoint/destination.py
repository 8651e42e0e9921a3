"""Destination: where a stored tensor of a checkpoint goes, and which part of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from .safetensors_files import StoredTensor

Empty = Callable[..., torch.Tensor]
Part = Callable[[int], range]  # of so many equal things, those of a rank
ALL: tuple[slice, ...] = (slice(None),)


@dataclass(frozen=True, slots=True)
class Destination:
    """A stored tensor of `shape` is copied to `part`, a view of a parameter (broadcast where part is larger).

    turned: how what is read of the stored tensor is looked at first; None: as it is.
    places: which parts of the stored tensor they are, one behind the other by rows; all of it by default.
    """

    part: torch.Tensor
    shape: tuple[int, ...]
    turned: Callable[[torch.Tensor], torch.Tensor] | None = None
    places: tuple[tuple[slice, ...], ...] = (ALL,)

    def fill(self, stored: torch.Tensor | StoredTensor) -> None:
        """Reads no more than what goes to the part. Raises WeightsError."""
        if len(self.places) == 1:
            self._put(self.part, stored[self.places[0]])
            return
        at = 0
        for place in self.places:
            found = stored[place]
            self._put(self.part[at : at + len(found)], found)
            at += len(found)

    def _put(self, part: torch.Tensor, found: torch.Tensor) -> None:
        part.copy_(found if self.turned is None else self.turned(found))


def take_all(part: torch.Tensor) -> Destination:
    """All of a stored tensor of the same shape."""
    return Destination(part, tuple(part.shape))


def take_kinds(part: torch.Tensor, sizes: Sequence[int], own: Part, order: Sequence[int] = ()) -> Destination:
    """The rank's rows of each kind, of a stored tensor that has so many of each, one kind behind the other.

    order: of the kinds in `part`; (): as they are stored.
    """
    firsts, places = (0, *accumulate(sizes)), []
    for kind in order or range(len(sizes)):
        rows = own(sizes[kind])
        places.append((slice(firsts[kind] + rows.start, firsts[kind] + rows.stop),))
    return Destination(part, (sum(sizes), *part.shape[1:]), places=tuple(places))
