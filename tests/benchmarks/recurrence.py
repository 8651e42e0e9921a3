"""A gated delta net of Qwen3-Next's shape on a CPU: its decodes and a prompt, compiled, against torch's operations, in turn.

One layer's convolution, rule and norm, without its projections: 16 heads of keys and 32 of values of 128 dimensions, on pages.
In one thread, because several wait for each other where other processes compute. Times are of the clock, and of the processor;
the least of some rounds.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.recurrent.delta_rule import delta_decode, delta_prefill
from kvkeeper.kernels.recurrent.gated_norm import gated_norm
from kvkeeper.kernels.types import STATE_CHUNK, DeltaInputs, DeltaState, StateChunks, StateRows

_KEYS, _VALUES, _DIM, _KERNEL = 16, 32, 128, 4
_CHANNELS = (2 * _KEYS + _VALUES) * _DIM
_PROMPT, _NUM_PAGES, _ROUNDS = 512, 17, 5


def figures() -> Iterator[dict[str, object]]:
    if not compiled.is_installed():
        return
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        state = DeltaState(
            torch.zeros(_NUM_PAGES, _VALUES, _DIM, _DIM), torch.zeros(_NUM_PAGES, _KERNEL - 1, _CHANNELS, dtype=dtype)
        )
        for kind, num_tokens in (("decode", 1), ("decode", 16), ("prefill", _PROMPT)):
            compute = partial(_compute, _make_inputs(num_tokens, dtype), state, _make_rows(kind, num_tokens))
            ours, theirs = _time_both(compute)
            yield {
                "kind": kind,
                "tokens": num_tokens,
                "dtype": str(dtype).removeprefix("torch."),
                "ms": round(1e3 * ours[0], 3),
                "torch_ms": round(1e3 * theirs[0], 3),
                "ratio": round(theirs[0] / ours[0], 2),
                "processor_ratio": round(theirs[1] / ours[1], 2),
            }
    torch.set_num_threads(num_threads)


def _make_inputs(num_tokens: int, dtype: torch.dtype) -> DeltaInputs:
    mixed, gates, conv = (
        torch.randn(*shape).to(dtype) for shape in ((num_tokens, _CHANNELS), (num_tokens, 2 * _VALUES), (_CHANNELS, _KERNEL))
    )
    return DeltaInputs(mixed, gates, conv, torch.zeros(_VALUES), torch.zeros(_VALUES))


def _make_rows(kind: str, num_tokens: int) -> StateRows | StateChunks:
    """Rows in their own pages, or one row from the first token on."""
    if kind == "decode":
        pages = torch.arange(1, num_tokens + 1)
        return StateRows(None, pages, pages)
    count = num_tokens // STATE_CHUNK
    none = torch.zeros(count, dtype=torch.int64)
    writes = none.clone()
    writes[-1] = 1
    firsts = STATE_CHUNK * torch.arange(count)
    return StateChunks(none[:1], torch.tensor([0, count]), none, firsts, torch.full((count,), STATE_CHUNK), writes)


def _compute(inputs: DeltaInputs, state: DeltaState, rows: StateRows | StateChunks) -> None:
    out = inputs.mixed.new_empty(len(inputs.mixed), _VALUES, _DIM)
    if isinstance(rows, StateRows):
        delta_decode(inputs, state, rows, out)
    else:
        delta_prefill(inputs, state, rows, out)
    gated_norm(out, inputs.mixed[:, : _VALUES * _DIM], inputs.conv.flatten()[:_DIM].contiguous(), 1e-6)


def _time_both(compute: Callable[[], None]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of the clock and of the processor, compiled and by torch."""
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with torch.inference_mode():
        for _ in range(_ROUNDS + 1):
            for is_compiled, times in found.items():
                compiled.switch(on=is_compiled)
                begin = time.perf_counter(), time.process_time()
                compute()
                times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    compiled.switch(on=False)
    ours, theirs = ((min(each[0] for each in times[1:]), min(each[1] for each in times[1:])) for times in found.values())
    return ours, theirs
