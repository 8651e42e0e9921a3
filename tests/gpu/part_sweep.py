"""Part s: decode and prefill attention with other options of their launches, against those that they have.

Options are compiled side by side first, in processes of their own, and then measured by one process that finds them compiled.
The figures say what to write into the launchers; none fails the part. `python -m tests.gpu.part_sweep SHARE SHARES [dry]`
compiles one share of them.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.gpu.variants import PrefillShape
from tests.gpu.checks import Check, guarded
from tests.gpu.part_speed import get_paged, make_random
from tests.gpu.stopwatch import Stopwatch

_GPU = "kvkeeper.kernels.gpu"
_HEADS = 32


@dataclass(frozen=True, slots=True)
class _Options:
    """Of one launch. rows: of a program of prefill. per_multiprocessor: programs that decode's work list is cut for."""

    tile: int
    warps: int
    stages: int
    rows: int = 0
    per_multiprocessor: int = 2

    def __str__(self) -> str:
        rows = f"m{self.rows}_" if self.rows else f"p{self.per_multiprocessor}_"
        return f"{rows}t{self.tile}_w{self.warps}_s{self.stages}"


_DECODE = [
    _Options(128, 4, 3),
    *(_Options(tile, warps, stages) for tile, warps in ((64, 4), (32, 4), (128, 8)) for stages in (2, 3, 4, 5)),
    *(_Options(128, 4, stages) for stages in (2, 4, 5)),
    *(_Options(64, 4, stages, per_multiprocessor=per) for stages in (3, 5) for per in (4, 6)),
    _Options(32, 2, 5),
    _Options(64, 2, 3),
]
_PREFILL = [
    *(_Options(64, 4, stages, 64) for stages in (2, 3, 5)),
    *(_Options(64, 8, stages, 128) for stages in (5, 3, 2)),
    *(_Options(128, 8, stages, 128) for stages in (3, 2)),
    *(_Options(32, 4, stages, 64) for stages in (5, 3)),
    _Options(128, 4, 2, 64),
    _Options(32, 8, 3, 128),
    _Options(64, 4, 3, 128),
]
_DECODE_SHAPES = [(1, 32_768, 128), (32, 4096, 128), (256, 1024, 128), (64, 2048, 64), (256, 256, 64)]
_PREFILL_SHAPES = [(1, 8192, 128), (16, 512, 128), (1, 8192, 64), (64, 128, 64)]


class _Launch:
    """A kernel whose launches have these constants and options instead of those that they are given."""

    def __init__(self, kernel: Any, **options: int) -> None:
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._kernel[grid](*args, **kwargs | self._options)


def run(is_dry: bool) -> Iterator[Check]:
    """A check for each kernel and shape, with the time of each choice; a rehearsal has tiny shapes and one choice."""
    shares = 1 if is_dry else max((os.cpu_count() or 2) - 2, 1)
    command = [sys.executable, "-m", "tests.gpu.part_sweep"]
    end = ["dry"] if is_dry else []
    compiling = [subprocess.Popen([*command, str(share), str(shares), *end]) for share in range(shares)]
    codes = [process.wait() for process in compiling]
    yield Check("compiled", None, {"processes": shares, "failed": sum(code != 0 for code in codes)})
    watch, times = Stopwatch("cpu" if is_dry else "cuda"), dict[str, dict[str, Any]]()
    for shape, options, launch in _launches(watch, is_dry):
        found = guarded(shape, partial(_measured, watch, launch, is_dry))
        times.setdefault(shape, {})[str(options)] = found.figures.get("us", found.note)
    for shape, by_options in times.items():
        figures = {name: value for name, value in by_options.items() if isinstance(value, float)}
        failed = {name: value for name, value in by_options.items() if not isinstance(value, float)}
        first, best = next(iter(figures.values()), 0.0), min(figures, key=lambda name: figures[name], default="none")
        note = f"best {best}, {first / figures.get(best, 1.0):.3f} times as fast as what is first; {failed or ''}"
        yield Check(f"sweep_{shape}", None, {name: round(value, 2) for name, value in figures.items()}, note)


def _measured(watch: Stopwatch, launch: Callable[[], object], is_dry: bool) -> Check:
    return Check("", None, {"us": watch.in_graph(launch, calls=1 if is_dry else 4, runs=1 if is_dry else 5) * 1e6})


def _launches(watch: Stopwatch, is_dry: bool) -> Iterator[tuple[str, _Options, Callable[[], object]]]:
    """Each shape with each choice, and a launch of it."""
    for num_seqs, seq_len, head_dim in [(2, 64, 16)] if is_dry else _DECODE_SHAPES:
        layer, tables = get_paged(watch, num_seqs, seq_len, head_dim)
        lens = torch.full((num_seqs,), seq_len, device=watch.device, dtype=torch.int32)
        q = make_random(watch, num_seqs, _HEADS, head_dim)
        for options in _DECODE[:1] if is_dry else _DECODE:
            decode = partial(paged_attention_decode, q, layer, tables, lens, scale=head_dim**-0.5)
            yield f"decode_{num_seqs}x{seq_len}_d{head_dim}", options, partial(_decoded, options, decode)
    for num_seqs, seq_len, head_dim in [(2, 64, 16)] if is_dry else _PREFILL_SHAPES:
        layer, tables = get_paged(watch, num_seqs, seq_len, head_dim)
        lens = torch.full((num_seqs,), seq_len, device=watch.device, dtype=torch.int32)
        locs = torch.arange(num_seqs + 1, device=watch.device, dtype=torch.int32) * seq_len
        q = make_random(watch, num_seqs * seq_len, _HEADS, head_dim)
        for options in _PREFILL[:1] if is_dry else _PREFILL:
            prefill = partial(paged_attention_prefill, q, layer, tables, lens, locs, scale=head_dim**-0.5)
            yield f"prefill_{num_seqs}x{seq_len}_d{head_dim}", options, partial(_prefilled, options, prefill)


def _decoded(options: _Options, decode: Callable[[], object]) -> object:
    from kvkeeper.kernels.gpu import decode_work, paged_attention_decode

    launch = _Launch(paged_attention_decode.decode_kernel, num_warps=options.warps, num_stages=options.stages)
    with ExitStack() as stack:
        stack.enter_context(patch.object(paged_attention_decode, "decode_kernel", launch))
        stack.enter_context(patch.object(decode_work, "PROGRAMS_PER_MULTIPROCESSOR", options.per_multiprocessor))
        for module in (decode_work, paged_attention_decode):
            stack.enter_context(patch.object(module, "tile_tokens", lambda _: options.tile))
        return decode()


def _prefilled(options: _Options, prefill: Callable[[], object]) -> object:
    from kvkeeper.kernels.gpu import paged_attention_prefill as gpu

    shape = PrefillShape(options.rows, options.tile, options.warps, options.stages)
    with patch.object(gpu, "prefill_shape", lambda *_, **__: shape):
        return prefill()


def _compile(share: int, shares: int, is_dry: bool) -> None:
    """One that does not compile shows again where it is measured."""
    for number, (name, _, launch) in enumerate(_launches(Stopwatch("cpu" if is_dry else "cuda"), is_dry)):
        if number % shares == share:
            guarded(name, partial(_once, name, launch))


def _once(name: str, launch: Callable[[], object]) -> Check:
    launch()
    return Check(name, True)


if __name__ == "__main__":
    _compile(int(sys.argv[1]), int(sys.argv[2]), "dry" in sys.argv)
