"""DecodePrograms: steps that only decode, from the first layer to the logits, as programs (kernels/cpu/program.py).

What graphs are on a device, for a CPU: Python has no part in what happens between two layers. A program has the number of rows
and the width of the tables built in, and reads its step from memory of its own, which each step is copied to. A model with a
layer that cannot be recorded computes plainly, and so does a step that the programs are not for. Only one thread computes.
"""

import dataclasses
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, Final, TypeVar

import structlog
import torch

from kvkeeper.kernels.cpu.launch import THREADS
from kvkeeper.kernels.cpu.program import Memory, NotRecordable, Program, record

from ..model.decoder import Layers, LayersInput

log = structlog.get_logger()
T = TypeVar("T")

_TRY_STEPS: Final = 8  # in a row with one number of threads
_NUM_TRIES: Final = 6
_KEEP_STEPS: Final = 4096
_LONGEST_S: Final = 1.0  # between steps of which one follows the other
_LEAVES: Final = frozenset((int, bool, NoneType))
_MOST_PROGRAMS: Final = 256  # numbers of rows and widths that are kept; the least recently used one goes


class DecodePrograms:
    """The programs of one decoder on one arena."""

    def __init__(self, arena: torch.Tensor) -> None:
        """arena: what programs read and write where it is."""
        self._arena_at = arena.untyped_storage().data_ptr()
        self._memory = Memory()
        self._programs: OrderedDict[tuple[Any, ...], tuple[list[torch.Tensor], Program, torch.Tensor]] = OrderedDict()
        self._met: set[tuple[Any, ...]] = set()
        self._is_refused = False
        self._threads: dict[int, ThreadChoice] = {}  # by the number of rows, up to a power of two
        self.num_runs = 0

    def run(self, layers: Layers, given: LayersInput) -> torch.Tensor:
        """What the layers make of a step that only decodes; see Decoder.forward. It is valid until the next call."""
        if self._is_refused:
            return layers(given)
        tensors = self._list_tensors(given)
        shapes = tuple((tensor.dtype, _get_room(tensor)) for tensor in tensors)
        if shapes not in self._programs:
            if shapes not in self._met:  # a recording takes as long as a few steps, which one step is not worth
                self._met.add(shapes)
                return layers(given)
            own = _map_tensors(given, self._make_own, {})
            try:
                program, made = record(lambda: layers(own), self._memory)
            except NotRecordable as error:
                log.info("decodes_not_recorded", message=f"decodes run kernel by kernel: a layer needs {error}")
                self._is_refused = True
                return layers(given)
            self._programs[shapes] = self._list_tensors(own), program, made
            if len(self._programs) > _MOST_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(shapes)
        own_tensors, program, made = self._programs[shapes]
        for tensor, to in zip(tensors, own_tensors, strict=True):
            (to if to.shape == tensor.shape else to[:, : tensor.shape[1]]).copy_(tensor)
        rows = 1 << (len(given.x) - 1).bit_length()
        if (threads := self._threads.get(rows)) is None:
            threads = self._threads[rows] = ThreadChoice(1 if THREADS is None else torch.get_num_threads(), rows)
        program.run(threads.choose(time.perf_counter()))
        self.num_runs += 1
        return made

    def _make_own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A program's tensor for it."""
        return tensor if self._is_arena(tensor) else torch.zeros(_get_room(tensor), dtype=tensor.dtype)

    def _list_tensors(self, given: LayersInput) -> list[torch.Tensor]:
        """The tensors in a step's columns, each once; of equal structures in an equal order.

        A list is one thing, which no step changes.
        """
        seen: set[int] = set()
        tensors: list[torch.Tensor] = []
        rest: list[Any] = [given]
        while rest:
            value = rest.pop()
            kind: type = value.__class__
            if kind in _LEAVES or id(value) in seen:
                continue
            seen.add(id(value))
            if kind is torch.Tensor:
                tensors.append(value)
            else:
                rest.extend(_find_getter(kind)(value))
        return [each for each in tensors if not self._is_arena(each)]

    def _is_arena(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._arena_at


class ThreadChoice:
    """Whether all threads compute, or all but one: the choice with which steps follow each other faster.

    A step of few rows waits for memory, and one core less hardly slows it; the loop, the fronts and the cache service then have
    that core. What is better depends on the machine and its load, so both are tried, in turns, and again after many steps.
    """

    def __init__(self, most: int, rows: int) -> None:
        """rows: of the largest step that it is for; the log says it."""
        self._rows, self._reported = rows, -1
        self._counts = (most, most - 1) if most > 1 else (most,)
        self._intervals: tuple[list[float], list[float]] = ([], [])
        self._chosen: int | None = None  # index of counts; None: they are tried
        self._num_steps, self._tried, self._last = 0, 0, 0.0

    def choose(self, now: float) -> int:
        """Threads of the step that begins at `now`, in seconds."""
        if len(self._counts) == 1:
            return self._counts[0]
        self._num_steps += 1
        interval, self._last = now - self._last, now
        if self._chosen is not None:
            if self._num_steps < _KEEP_STEPS:
                return self._counts[self._chosen]
            self._chosen, self._num_steps, self._intervals = None, 0, ([], [])
        elif self._num_steps % _TRY_STEPS != 1 and interval < _LONGEST_S:  # behind a step with the same number
            self._intervals[self._tried].append(interval)
        if self._num_steps >= _NUM_TRIES * _TRY_STEPS and all(self._intervals):
            medians = [statistics.median(each) for each in self._intervals]
            self._chosen, self._num_steps = int(medians[1] < medians[0]), 0
            if self._chosen != self._reported:
                self._reported = self._chosen
                log.info("threads_chosen", rows_up_to=self._rows, threads=self._counts[self._chosen])
            return self._counts[self._chosen]
        self._tried = self._num_steps // _TRY_STEPS % 2
        return self._counts[self._tried]


def _get_room(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a program's tensor for it: of integers, which are tables, of a width that several steps have."""
    if tensor.dim() != 2 or tensor.is_floating_point():
        return tuple(tensor.shape)
    return len(tensor), 1 << (tensor.shape[1] - 1).bit_length()


@cache
def _find_getter(kind: type) -> Callable[[Any], Iterable[Any]]:
    """What returns the parts of a value of this type; looking at a type in each step would take as long as a small layer."""
    if dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(kind)]
        return attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]
    return dict.values if issubclass(kind, dict) else tuple if issubclass(kind, tuple) else lambda value: ()


def _map_tensors(value: T, change: Callable[[torch.Tensor], torch.Tensor], changed: dict[int, Any]) -> T:
    """The same value with other tensors; what occurs twice is changed once. changed: by the id of what was there before."""
    if isinstance(value, int) or value is None:
        return value
    found: Any = changed.get(id(value))
    if found is not None:
        return found
    found = value
    if isinstance(value, torch.Tensor):
        found = change(value)
    elif isinstance(value, tuple):
        parts = [_map_tensors(part, change, changed) for part in value]
        found = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    elif isinstance(value, dict):
        found = {key: _map_tensors(part, change, changed) for key, part in value.items()}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if each.init]
        found = dataclasses.replace(value, **{name: _map_tensors(getattr(value, name), change, changed) for name in names})
    changed[id(value)] = found
    return found
