"""A program: the kernels that a function launches, recorded once, and run again in one call.

Between two kernels of a forward pass Python checks, allocates and packs arguments, and the threads of a kernel are woken and
put to sleep. A program has all of that behind it: its threads meet at a barrier between two kernels, and Python does not run.
What CUDA graphs are to a device, it is to a CPU.

Owns what may be recorded: launches of compiled kernels, memory, views of it, and products of torch's. A function that does
anything else with tensors cannot be recorded, which is found out while it is recorded and not believed; but what passes torch's
dispatcher by, as a collective or a read of a value, is not seen, so callers record nothing that does. A program reads and
writes the memory that the function was given and made. Programs of one Memory have theirs in common, so one of them runs at a
time, and what it returned lasts until the next one runs.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .compiled import kernel
from .launch import KERNEL, THREADS, recorder

T = TypeVar("T")

_VIEWS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view",
        "alias",
        "as_strided",
        "detach",
        "chunk",
        "expand",
        "flatten",
        "narrow",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "t",
        "tensor_split",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
    )
)
_MADE: Final = frozenset(("aten::empty", "aten::empty_like", "aten::new_empty"))
_PRODUCT: Final = "mkldnn::_linear_pointwise"


class NotRecordable(Exception):
    """The function does something that a program cannot do again."""


@dataclass(slots=True)
class _Kernels:
    """Calls of kernels in a row: address and arguments."""

    calls: list[tuple[int, bytes]] = field(default_factory=list)

    def prepare(self) -> Callable[[int], None]:
        """The call that runs them, in so many threads."""
        # Sixteen bytes of room behind each one's arguments keep them apart from the next one's.
        kept = [ctypes.create_string_buffer(arguments, len(arguments) + 16) for _, arguments in self.calls]
        pairs = zip(kept, self.calls, strict=True)
        places = ((address, ctypes.addressof(own), len(arguments) - 8) for own, (address, arguments) in pairs)
        calls = np.array([(address, at, at + taken) for address, at, taken in places], np.int64)
        program = kernel("run_program", torch.float32)
        of_threads = (0, 0, 0) if THREADS is None else (*THREADS.addresses, THREADS.barrier)
        packed = np.array((*of_threads, calls.ctypes.data, len(calls)), np.int64).tobytes()
        alone = KERNEL(program)

        def run(num_threads: int, kept: Any = (kept, calls)) -> None:
            if THREADS is None:
                alone(packed)
            else:
                THREADS.parallel(program, packed, num_threads, 0)

        return run


class Memory:
    """What recorded functions make. A piece is free again once no tensor of the recording under way lies in it."""

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.UntypedStorage, int]] = []  # with the references to it that are not the recording's

    def begin(self) -> None:
        """All pieces are free for another recording."""
        self._pieces = [(piece, _count_references(piece)) for piece, _ in self._pieces]

    def make_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like it in the smallest free piece that holds it, or in a new one."""
        num_bytes = max(tensor.untyped_storage().nbytes(), 1)
        free = [piece for piece, before in self._pieces if piece.nbytes() >= num_bytes and _count_references(piece) == before]
        if free:
            piece = min(free, key=torch.UntypedStorage.nbytes)
        else:
            piece = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
            self._pieces.append((piece, _count_references(piece)))
        return torch.empty(0, dtype=tensor.dtype).set_(piece, 0, tensor.shape, tensor.stride())

    def find(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """The piece that a tensor lies in; None: it is of other memory."""
        at = tensor.untyped_storage().data_ptr()
        return next((piece for piece, _ in self._pieces if piece.data_ptr() == at), None)


def _count_references(piece: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(piece._cdata))


class Program:
    """Recorded steps."""

    def __init__(self, steps: Sequence[Callable[[int], None]]) -> None:
        self._steps = steps

    def run(self, num_threads: int) -> None:
        """Do it all again, on what lies in the memory now. The result does not depend on the number of threads."""
        for step in self._steps:
            step(num_threads)


class _Recording(TorchDispatchMode):
    """What is noted meanwhile: kernels in a row, and products of torch's between them."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self.steps: list[_Kernels | _Product] = []

    def add(self, address: int, arguments: bytes) -> None:
        """See launch.Recorder."""
        if not self.steps or not isinstance(self.steps[-1], _Kernels):
            self.steps.append(_Kernels())
        last = self.steps[-1]
        assert isinstance(last, _Kernels), "appended just now"
        last.calls.append((address, arguments))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch's compiler would be imported for it, which takes a second that requests would wait."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in _VIEWS:
            viewed = func(*args, **(kwargs or {}))
            for each in (viewed,) if isinstance(viewed, torch.Tensor) else viewed:
                if each.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
                    raise NotRecordable(f"{name}, which has copied here")
            return viewed
        if name not in _MADE and name != _PRODUCT:
            raise NotRecordable(name)
        made = func(*args, **(kwargs or {}))
        own = self._memory.make_like(made)
        if name == _PRODUCT:
            places = _Place(own, self._memory), _Place(args[0], self._memory)
            self.steps.append(_Product(*places, func, args[1:]))
        return own


@dataclass(slots=True)
class _Product:
    """A product of torch's: where its rows are and where the result goes, and its other arguments.

    Until it is prepared it holds no tensor of the recording's memory, which is used again in the meantime.
    """

    out: "_Place"
    x: "_Place"
    product: Callable[..., torch.Tensor]
    others: Any

    def prepare(self) -> Callable[[int], None]:
        """The call that runs it."""
        out, x = self.out.make_tensor(), self.x.make_tensor()

        def run(num_threads: int) -> None:
            out.copy_(self.product(x, *self.others))

        return run


class _Place:
    """Where a tensor is. tensor: held where it is not of a piece of memory."""

    def __init__(self, tensor: torch.Tensor, memory: Memory) -> None:
        self._piece = memory.find(tensor)
        self._tensor = tensor if self._piece is None else None
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def make_tensor(self) -> torch.Tensor:
        if self._piece is None:
            assert self._tensor is not None, "held"
            return self._tensor
        return torch.empty(0, dtype=self._dtype).set_(self._piece, *self._view)


def record(compute: Callable[[], T], memory: Memory) -> tuple[Program, T]:
    """The program of a function, and what the function returned, whose tensors each run writes anew.

    The function's kernels do not run meanwhile, so nothing that it reads has to be there yet. The memory that it is given has
    to stay, and `memory` serves one recording at a time.
    Raises NotRecordable, and whatever the function raises.
    """
    recording = _Recording(memory)
    memory.begin()
    before = recorder.set(recording)
    try:
        with recording:
            made = compute()
    finally:
        recorder.reset(before)
    return Program([step.prepare() for step in recording.steps]), made
