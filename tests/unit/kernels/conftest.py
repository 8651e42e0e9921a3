"""The paths of the kernels: torch's ops and the compiled ones of a CPU, and the Triton kernels in Triton's interpreter.

Triton reads the interpreter's switch where a function is decorated, its own library's included. So Triton and the kernels are
imported here, with the switch on, before any test runs; for everything else in this process and its children it is off. Where
Triton was imported before, as torch does when transformers asks it about compilers, it is imported a second time, all but its
binary module. One torch thread: the tensors are tiny, and test runs share their cores.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvkeeper.kernels.gpu
from kvkeeper.kernels.activations.linear_weight import LinearWeight
from kvkeeper.kernels.cpu import compiled
from tests.unit.kernels.gpu.pretend import on_cuda

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

torch.set_num_threads(1)


class KernelPath:
    """How an op is called on one of the paths: on a device its tensors claim to be there, and what comes back is plain."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def is_device(self) -> bool:
        return self.name == "interpreted"

    def __call__(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not self.is_device:
                return op(*args, **options)
            return _plain(op(*map(_there, args), **{name: _there(value) for name, value in options.items()}))

        return call


def _there(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return on_cuda(value)[0]
    if isinstance(value, LinearWeight):
        return LinearWeight(_there(value.data), _there(value.bias))
    if isinstance(value, tuple):
        parts = map(_there, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value.as_subclass(torch.Tensor)


@pytest.fixture(params=["torch", "compiled", "interpreted"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelPath]:
    """Every test that has it runs on each path; on the compiled one where numba is installed."""
    if request.param == "compiled" and not compiled.is_installed():
        pytest.skip("numba, of the extra cpu, is not installed")
    if request.param == "interpreted":
        monkeypatch.setenv(_SWITCH, "1")
    compiled.switch(on=request.param == "compiled")
    yield KernelPath(request.param)
    compiled.switch(on=False)
