"""The dtype that a model computes in, by name. Not in the loader, so that it is known without importing torch."""

from collections.abc import Mapping
from typing import Final, Literal

from .checkpoint.errors import UnsupportedModelError

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8"]
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
# An opt-in for matrix products. Embeddings, K, V and all else are what auto gives, and on a CPU float32.
INTEGER_BITS: Final[Mapping[str, Literal[8, 4]]] = {"int8": 8, "int4": 4}
# The same with weights and rows in 8-bit floats, on CUDA alone. All else is bfloat16, the head too; experts are as with int8.
FLOAT8: Final = "fp8"
QUANTISED: Final = (*INTEGER_BITS, FLOAT8)
_BFLOAT16: Final = "bfloat16"


def weight_bytes(choice: str) -> float:
    """The bytes of a weight, and of its part of what its group of 32 has: a scale of two bytes, and with 4 bits a low.

    Of 8-bit floats those that experts take, which are a sixteenth more.
    """
    bits = INTEGER_BITS.get(choice, 8)
    return (bits + (0.5 if bits == 8 else 1)) / 8


def dtype_name(weights_dtype: object, device_type: str, choice: str, *, has_bfloat16: bool) -> str:
    """The dtype of all that is not integers; weights_dtype is the config's word.

    has_bfloat16: whether a CPU multiplies bfloat16. Raises UnsupportedModelError.
    """
    if choice == FLOAT8:
        if device_type == "cpu":
            raise UnsupportedModelError("dtype", choice, "on a CPU int8, which is faster there; fp8 is for --device cuda")
        return _BFLOAT16
    if choice in INTEGER_BITS:
        choice, has_bfloat16 = "auto", False
    name = choice
    if choice == "auto":
        name = str(weights_dtype or "bfloat16").removeprefix("torch.")
        if device_type == "cpu" and not (has_bfloat16 and name == _BFLOAT16):
            name = "float32"  # the fast one then, and what numerics are held to
    if name not in DTYPE_BYTES:
        raise UnsupportedModelError("dtype", name, ", ".join(("auto", *DTYPE_BYTES, *QUANTISED)))
    return name
