"""Destination: where a stored tensor of a checkpoint goes, and which part of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .safetensors_files import StoredTensor

Empty = Callable[..., torch.Tensor]
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
