"""StateTensor: a tensor that a layer's state consists of, as the shape of the layer declares it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateTensor:
    """is_wide: it is float32, whatever the model's dtype is. Wide ones come first in a state."""

    shape: tuple[int, ...]
    is_wide: bool = False
