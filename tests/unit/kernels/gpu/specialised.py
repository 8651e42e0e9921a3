"""Which kernels Triton would compile for launches that are interpreted, by the key under which it looks a kernel up.

Triton's own code makes the key: types, constants, which pointers are None or at a multiple of 16 bytes, which integers are 1 or
a multiple of 16, and the options of the launch. Where a kernel's numbers do not matter, it is not run.
"""

import inspect

import triton.runtime.interpreter as interpreter
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

Key = tuple[str, str]  # a kernel's name, and all that it is compiled for

_BACKEND = make_backend(GPUTarget("cuda", 90, 32))
_binders = {}
_keys = {}  # of launches that were seen before, as Triton keeps them


def key_of(function: interpreter.InterpretedFunction, args: tuple, kwargs: dict) -> Key:
    """Of one launch of a kernel."""
    if function.fn not in _binders:
        compiled = JITFunction(function.fn, **{name: function.kwargs[name] for name in _OPTIONS if name in function.kwargs})
        _binders[function.fn] = create_function_from_signature(compiled.signature, compiled.params, _BACKEND)
    _, specialisation, options = _binders[function.fn](*args, **kwargs)
    return function.fn.__name__, compute_cache_key(_keys, specialisation, options)


_OPTIONS = inspect.signature(JITFunction.__init__).parameters.keys() - {"self", "fn"}


def note_launches(monkeypatch) -> set[Key]:
    """The keys of all launches from here on, none of which is run."""
    seen: set[Key] = set()

    def note(self, *args, grid, warmup, **kwargs):
        seen.add(key_of(self, args, kwargs))

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", note)
    return seen
