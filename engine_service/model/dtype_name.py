"""The dtype that a model computes in, by name. Not in the loader, so that it is known without importing torch."""

from typing import Final, Literal

from .checkpoint.errors import UnsupportedModelError

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(weights_dtype: object, device_type: str, choice: str) -> str:
    """weights_dtype is the config's word. Raises UnsupportedModelError."""
    # On a CPU float32 is the fast one, and what numerics are held to.
    name = choice
    if choice == "auto":
        name = "float32" if device_type == "cpu" else str(weights_dtype or "bfloat16").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedModelError("dtype", name, ", ".join(("auto", *DTYPE_BYTES)))
    return name
