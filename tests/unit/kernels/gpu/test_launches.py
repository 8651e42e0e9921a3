"""Every kernel is in a launch that is compiled, so that the gates of test_compiled.py see it. Nothing is run here."""

import importlib
import pkgutil

import triton.runtime.interpreter as interpreter

import kvkeeper.kernels.gpu
from tests.unit.kernels.gpu.launches import LAUNCHES


def kernels():
    """The functions of kernels/gpu that are launched, by their names."""
    names = (module.name for module in pkgutil.iter_modules(kvkeeper.kernels.gpu.__path__))
    modules = [importlib.import_module(f"kvkeeper.kernels.gpu.{name}") for name in names]
    jitted = (each for module in modules for each in vars(module).values() if isinstance(each, interpreter.InterpretedFunction))
    return {each.fn.__name__ for each in jitted if each.fn.__name__.endswith("_kernel")}


def test_every_kernel_is_in_a_launch_that_is_compiled(monkeypatch):
    launched = set()
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **kwargs: launched.add(self.fn.__name__))
    for launch in LAUNCHES.values():
        launch()
    assert len(launched) > 20
    assert launched == kernels()
