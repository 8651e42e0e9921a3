"""Loads the kernels of a format: quantised_kernels.py as a module of its own for each.

Owns the modules' names. A name tells the format, and a stamp of kernels.py, which the loops are compiled from as well: numba
renews what is on disk when the kernels' own file has changed, and asks for no other.
"""

import sys
import zlib
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..quantised.formats import KvFormat

_FOLDER = Path(__file__).parent


@cache
def of_format(kv_format: "KvFormat") -> ModuleType:
    """Compile the format's kernels, or take them from disk. Raises ImportError where numba is not installed."""
    stamp = zlib.crc32((_FOLDER / "kernels.py").read_bytes())
    name = f"{__package__}.quantised_kernels_{stamp:08x}_{kv_format.name}"
    spec = spec_from_file_location(name, _FOLDER / "quantised_kernels.py")
    assert spec is not None, "of a Python file"
    assert spec.loader is not None, "of a Python file"
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
