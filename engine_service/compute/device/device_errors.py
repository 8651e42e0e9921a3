"""What torch and Triton say of a device's errors, as names and meanings of kvkeeper.common.cuda.errors.

An error is known by its class and number, and by its words only where it has neither: Triton raises a RuntimeError with the
driver's words, and so does torch for calls of the driver and for what NCCL says of them. Of an error that came while another
one was handled, as of a capture that was broken off, the one that says more counts. Owns which errors end the process, and what
is kept until then.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvkeeper.common.cuda.errors import MEANINGS, NAMES_BY_NUMBER, NAMES_BY_WORDS, NO_MEMORY, CudaError, Meaning

from ...values.errors import DeviceLost

_NO_MEMORY_NAME = NAMES_BY_NUMBER[2]
_REPORTED = re.compile(r"(?:CUDA error|CUDA driver error|Triton Error \[CUDA\]): (?P<words>.*)")
_NAMED = re.compile(r"\bcudaError[A-Z]\w+")
_OF_CUBLAS = re.compile(r"CUBLAS_STATUS_\w+")
_OF_NCCL = re.compile(r"NCCL error.*\bCuda failure (?:\d+ )?'(?P<words>[^']*)'", re.DOTALL)
_SIZES = re.compile(r"Tried to allocate (?P<asked>[\d.]+ \w+)\..*? of which (?P<free>[\d.]+ \w+) is free", re.DOTALL)

_kept: list[object] = []


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """An error of a device.

    Attributes:
        sizes: what was asked for and what is free, where memory is short and torch says so.
        where: the process that met it, and its device; empty: this process.
    """

    name: str
    sizes: str = ""
    where: str = ""

    @property
    def meaning(self) -> Meaning | None:
        """None where nothing is known of it."""
        return MEANINGS.get(self.name)

    @property
    def is_out_of_memory(self) -> bool:
        return self.meaning is NO_MEMORY

    @property
    def is_sticky(self) -> bool:
        """Whether this process can compute nothing more on the device."""
        return self.meaning is not None and self.meaning.is_sticky

    def text(self, saves_memory: str = "") -> str:
        """What happened and what helps, in one line. saves_memory: what else helps here where memory is short."""
        summary = (f"{self.where}: " if self.where else "") + self.name + (f" ({self.sizes})" if self.sizes else "")
        if self.meaning is None:
            return summary
        also = f"; {saves_memory}" if saves_memory and self.is_out_of_memory else ""
        return f"{summary}: {self.meaning}{also}"


class ReportedFault(Exception):
    """Another process of the same model reported a fault of its device, after which neither it nor the engine continues."""

    def __init__(self, fault: DeviceFault) -> None:
        super().__init__(fault.text())
        self.fault = fault


def find_fault(error: BaseException) -> DeviceFault | None:
    """The error of a device that the exception is, or came of; None: of no device."""
    faults = [fault for each in _with_causes(error) if (fault := _fault_in(each)) is not None]
    sticky = [fault for fault in faults if fault.is_sticky]
    known = [fault for fault in faults if fault.meaning is not None]
    return next(iter(sticky or known or faults), None)


def lost_by(error: BaseException) -> DeviceLost | None:
    """The end of the process's work on its device, where the exception means that."""
    if isinstance(error, DeviceLost):
        return error
    fault = find_fault(error)
    return DeviceLost(fault.text()) if fault is not None and fault.is_sticky else None


def keep_until_end(thing: object) -> None:
    """Keep what has memory of a lost device, or is mapped from it, until the process ends.

    Nothing can be given back to such a device. To free memory that copies were made to may end the process at once, before its
    clients are notified; and what is not unmapped must not look so to the cache service.
    """
    _kept.append(thing)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _fault_in(error: BaseException) -> DeviceFault | None:
    if isinstance(error, ReportedFault):
        return error.fault
    if isinstance(error, CudaError):
        return DeviceFault(error.name)
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        sizes = _SIZES.search(text)
        return DeviceFault(_NO_MEMORY_NAME, f"{sizes['asked']} were asked for, {sizes['free']} are free" if sizes else "")
    if isinstance(error, torch.AcceleratorError) and (number := getattr(error, "error_code", None)) is not None:
        return DeviceFault(NAMES_BY_NUMBER.get(number, f"CUDA error {number}"))
    if not isinstance(error, RuntimeError) or (match := _REPORTED.match(text) or _OF_NCCL.match(text)) is None:
        return None
    if (named := _NAMED.search(text)) is not None:
        return DeviceFault(named[0])
    words = match["words"]
    if (of_cublas := _OF_CUBLAS.match(words)) is not None:
        return DeviceFault(_NO_MEMORY_NAME if of_cublas[0] == "CUBLAS_STATUS_ALLOC_FAILED" else of_cublas[0])
    return DeviceFault(NAMES_BY_WORDS.get(words, f"CUDA error: {words}"))
