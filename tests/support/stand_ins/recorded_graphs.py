"""RecordedGraphs: a GraphApi that records the operations of a capture and runs them again on replay, without a device.

Torch's operations are seen as they are dispatched, and Triton's launches as the interpreter runs them. A replay works on the
very memory of the capture, as a device does: what an operation made then is overwritten, and what the host knew then is known
no more. A capture that reads a value back to the host is refused, as on a device. On a device graphs share the memory that they
make. So a replay here begins with all that its own capture made lost, as another graph may leave it. Of other memory a graph
has the address alone: a replay that reads or writes what was freed meanwhile is refused. What ranks do together is one recorded
call, if it is done through RecordedTogether.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from kvkeeper.engine_service.model.split import Together

READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}
_run_grid = interpreter.GridExecutor.__call__


class HostRead(Exception):
    """A captured function looked at a value on the device."""


class FreedMemory(Exception):
    """A replay came to an address whose memory is gone."""


@dataclass(frozen=True, slots=True)
class _Address:
    """A tensor as a graph knows it: where it is, and how it is laid out. It keeps no memory."""

    memory: StorageWeakRef
    empty: torch.Tensor  # of its kind and dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            raise FreedMemory(f"of a tensor {self.empty.dtype} {list(self.shape)} that was there when the graph was captured")
        found = torch.empty(0, dtype=self.empty.dtype, device=storage.device)
        return found.set_(storage, self.offset, self.shape, self.strides).as_subclass(type(self.empty))


def _addresses(arguments: Any) -> Any:
    """The same with an address for each tensor, but for weights that a library has packed."""

    def address(tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor
        empty = tensor.as_subclass(torch.Tensor).new_empty(0).as_subclass(type(tensor))
        memory = StorageWeakRef(tensor.untyped_storage())
        return _Address(memory, empty, tensor.storage_offset(), tensor.shape, tensor.stride())

    with torch.utils._python_dispatch._disable_current_modes():
        return tree_map_only(torch.Tensor, address, arguments)


def _found(arguments: Any) -> Any:
    """What _addresses was given. Raises FreedMemory."""
    return tree_map_only(_Address, _Address.tensor, arguments)


def _name(function: Any) -> str:
    return function.overloadpacket.__name__


def _tensors(tree: Any) -> list[torch.Tensor]:
    """All but weights that a library has packed, whose memory it does not show."""
    return [each for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor) and each.layout is torch.strided]


def _new_memory(made: Any, arguments: Any) -> list[torch.Tensor]:
    """Results that are memory of their own. The schema does not know: `contiguous` and `reshape` make a view, or a copy."""
    known = {each.untyped_storage().data_ptr() for each in _tensors(arguments)}
    return [each for each in _tensors(made) if each.untyped_storage().data_ptr() not in known]


class _Recorder(TorchDispatchMode):
    """Runs all operations, and records them and the memory that they make."""

    def __init__(self, steps: list[Callable[[], object]], memory: list[torch.UntypedStorage]) -> None:
        super().__init__()
        self._steps, self._memory = steps, memory

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if _name(function) in READS:
            raise HostRead(str(function))
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        arguments = _addresses((args, kwargs))

        def run() -> tuple[Any, Any]:
            args, kwargs = found = _found(arguments)
            return function(*args, **kwargs), found

        if any(returned.alias_info is not None and returned.alias_info.is_write for returned in function._schema.returns):
            self._steps.append(run)
            return made
        kept = _new_memory(made, (args, kwargs))
        if not kept:
            return made  # a view stays the view it is
        self._memory += [each.untyped_storage() for each in kept if not each.is_meta]

        def again() -> None:
            for old, new in zip(kept, _new_memory(*run()), strict=True):
                old.copy_(new)

        if not _name(function).startswith(("empty", "new_empty")):
            self._steps.append(again)
        return made


class Recorded:
    """A Graph. kernels: names of Triton's kernels, in the order of their launches. meetings: of what ranks do together."""

    def __init__(self, on_replay: Callable[[], None]) -> None:
        self.steps: list[Callable[[], object]] = []
        self.memory: list[torch.UntypedStorage] = []
        self.kernels: list[str] = []
        self.meetings: list[str] = []
        self._on_replay = on_replay

    def replay(self) -> None:
        self._on_replay()
        with torch.utils._python_dispatch._disable_current_modes():
            for storage in self.memory:  # NaN, and -1 as an integer
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
            for step in self.steps:
                step()


class RecordedGraphs:
    """See above. graphs: all that were captured."""

    def __init__(self, on_replay: Callable[[], None] = lambda: None) -> None:
        self.graphs: list[Recorded] = []
        self.capturing: Recorded | None = None
        self._on_replay = on_replay

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Recorded, torch.Tensor]:
        run()  # as CudaGraphs does
        self.capturing = graph = Recorded(self._on_replay)
        try:
            with _launches_into(graph), _unreadable(), _Recorder(graph.steps, graph.memory):
                made = run()
        finally:
            self.capturing = None
        self.graphs.append(graph)
        return graph, made


class RecordedTogether:
    """What ranks do together; within a capture it is done and recorded, since all ranks capture at once.

    num_met: how often they did, replays and all.
    """

    def __init__(self, together: Together, graphs: RecordedGraphs) -> None:
        self._together, self._graphs, self.num_met = together, graphs, 0

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        return self._do("add_up", part)

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        return self._do("gather", part)

    def share(self, given: torch.Tensor) -> torch.Tensor:
        return self._do("share", given)

    def _do(self, name: str, given: torch.Tensor) -> Any:
        graph = self._graphs.capturing
        if graph is None:
            return self._meet(name, given)
        with torch.utils._python_dispatch._disable_current_modes():
            made = self._meet(name, given)
            kept = [] if made is None else _new_memory(made, given)
        address = _addresses(given)

        def again() -> None:
            new = self._meet(name, _found(address))
            for old in kept:
                old.copy_(new)

        graph.memory += [each.untyped_storage() for each in kept]
        graph.steps.append(again)
        graph.meetings.append(name)
        return made

    def _meet(self, name: str, given: torch.Tensor) -> Any:
        self.num_met += 1
        return getattr(self._together, name)(given)


@contextmanager
def _unreadable():
    """Reads that no operation of torch stands for are refused as well. The interpreter's own are of plain tensors."""

    def refuse(tensor, *args, **kwargs):
        raise HostRead("a tensor's memory")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy", "__array__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


@contextmanager
def _launches_into(graph: Recorded):
    def run(self, *args, **kwargs):
        with torch.utils._python_dispatch._disable_current_modes():
            _run_grid(self, *args, **kwargs)
        arguments = _addresses((args, kwargs))

        def again() -> None:
            args, kwargs = _found(arguments)
            _run_grid(self, *args, **kwargs)

        graph.steps.append(again)
        graph.kernels.append(self.fn.__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", run)
        yield


class Allocation(Exception):
    """An operation made memory."""


class NothingAllocates(TorchDispatchMode):
    """Refuses every operation whose result is memory of its own."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if _new_memory(made, (args, kwargs)):
            raise Allocation(str(function))
        return made
