"""Run the Triton kernels in Triton's interpreter.

Triton reads the switch where a function is decorated, its own library's included. So Triton and the kernels are imported
here, with the switch on, before any test runs; for everything else in this process and its children it is off. Where Triton
was imported before, as torch does when transformers asks it about compilers, it is imported a second time, all but its binary
module.
"""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import pytest

import kvkeeper.kernels.gpu

_SWITCH = "TRITON_INTERPRET"

for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]:
    del sys.modules[name]
_before = os.environ.get(_SWITCH)
os.environ[_SWITCH] = "1"
try:
    for module in pkgutil.iter_modules([str(Path(kvkeeper.kernels.gpu.__file__).parent)]):
        importlib.import_module(f"kvkeeper.kernels.gpu.{module.name}")
finally:
    del os.environ[_SWITCH]
    if _before is not None:
        os.environ[_SWITCH] = _before


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv(_SWITCH, "1")
