"""Mixer: what a layer has in the place of attention that keeps a state: its weights, its arithmetic, where stored tensors go.

The decoder knows this alone, and no kind of mixer.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

import torch

from ..checkpoint.destination import Destination, Empty, Part
from ..experts import Weight
from .delta_net import allocate_delta_net
from .kimi_delta import allocate_kimi_delta
from .kimi_delta_config import KimiDeltaShape
from .recurrent_config import RecurrentShape
from .scan import allocate_scan
from .scan_config import ScanShape
from .short_conv import allocate_short_conv
from .short_conv_config import ShortConvShape
from .state_pages import StateMetadata


class Mixer(Protocol):
    """Weights of one layer. The output projection behind it is the layer's own."""

    def packed(self, pack: Callable[[Weight], Weight]) -> Self:
        """The same, with projections as `pack` gives them."""
        ...

    def run(self, x: torch.Tensor, eps: float, metadata: StateMetadata, at: int) -> torch.Tensor:
        """What the output projection takes [T, N], for x [T, H]; states are read and written.

        eps: of the model's norms. at: the layer's place in its group.
        """
        ...

    def destinations(self, whole: Any, own: Part) -> Iterator[tuple[str, Destination]]:
        """(name within the layer, destination) of every stored tensor but the output projection, of which the rank has a part.

        whole: the shape of the layer, of its kind, on one rank. own: the rank's part of its heads, groups or channels.
        """
        ...


def allocate_mixer(shape: RecurrentShape, hidden_size: int, empty: Empty) -> Mixer:
    """Empty weights of one layer."""
    if isinstance(shape, ShortConvShape):
        return allocate_short_conv(shape, hidden_size, empty)
    if isinstance(shape, ScanShape):
        return allocate_scan(shape, hidden_size, empty)
    if isinstance(shape, KimiDeltaShape):
        return allocate_kimi_delta(shape, hidden_size, empty)
    return allocate_delta_net(shape, hidden_size, empty)
