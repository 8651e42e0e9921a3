"""The dtype that a model computes in, by name. Not in the loader, so that it is known without importing torch."""

from collections.abc import Mapping
from typing import Final, Literal

from .checkpoint.errors import UnsupportedModelError

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
# Of a weight while the model is loaded. int8 and int4 are an opt-in for products on a CPU: weights are read as float32 and
# quantised then, and K, V and all else are float32.
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 4, "int4": 4}
INTEGER_BITS: Final[Mapping[str, Literal[8, 4]]] = {"int8": 8, "int4": 4}
_BFLOAT16: Final = "bfloat16"


def dtype_name(weights_dtype: object, device_type: str, choice: str, *, has_bfloat16: bool) -> str:
    """weights_dtype is the config's word. has_bfloat16: whether a CPU multiplies bfloat16. Raises UnsupportedModelError."""
    name = choice
    if choice == "auto":
        name = str(weights_dtype or "bfloat16").removeprefix("torch.")
        if device_type == "cpu" and not (has_bfloat16 and name == _BFLOAT16):
            name = "float32"  # the fast one then, and what numerics are held to
    if name not in DTYPE_BYTES:
        raise UnsupportedModelError("dtype", name, ", ".join(("auto", *DTYPE_BYTES)))
    if name in INTEGER_BITS and (choice != name or device_type != "cpu"):  # never because a config says so
        raise UnsupportedModelError("dtype", f"{name} on {device_type}", f"{name} on a CPU, where it is asked for")
    return name
