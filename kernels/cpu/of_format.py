"""Loads the kernels of a format: quantised_kernels.py as a module of its own for each.

Owns the modules' names, which end in the format's.
"""

import sys
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
    name = f"{__package__}.quantised_kernels_{kv_format.name}"
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
