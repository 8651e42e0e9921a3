"""HostReads: counts how often the host looks at a value where a device would have it wait until that was computed.

Operations of torch that read are seen as they are dispatched, and other reads of tensors by their methods. What Triton's
interpreter reads is the device's own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support.stand_ins.recorded_graphs import READS

# How many elements there are is read as well.
_COUNTED = READS | {"masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_INDEXING = ("index", "index_put", "index_put_")  # a mask has its places looked up
_METHODS = ("tolist", "numpy", "__array__", "cpu")


class HostReads:
    """count: so far."""

    def __init__(self) -> None:
        self.count = 0
        self._is_quiet = False  # within a kernel, or a read that was counted

    def note(self) -> None:
        self.count += not self._is_quiet

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What runs in it is a part of a step that a device may not have done yet."""
        run_grid = interpreter.GridExecutor.__call__

        def run(executor: Any, *args: Any, **kwargs: Any) -> None:
            with self._quiet(), _disable_current_modes():
                run_grid(executor, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.GridExecutor, "__call__", run)
            for name in _METHODS:
                patch.setattr(torch.Tensor, name, self._noting(getattr(torch.Tensor, name)))
            with _Operations(self):
                yield

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.note()
            with self._quiet():  # a subclass of Tensor has its methods called anew
                return method(tensor, *args, **kwargs)

        return run


class _Operations(TorchDispatchMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name in _INDEXING and any(each is not None and each.dtype is torch.bool for each in args[1])
        if name in _COUNTED or by_mask or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None):
            self._reads.note()
        return function(*args, **(kwargs or {}))
