"""Cases of part b for gated delta nets: states in pages of an arena, of Qwen3.5's shape, and of a small odd one."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.recurrent.delta_rule import delta_decode, delta_prefill
from kvkeeper.kernels.recurrent.gated_norm import gated_norm
from kvkeeper.kernels.types import STATE_CHUNK, DeltaInputs, DeltaState, StateChunks, StateRows
from tests.gpu.kernel_cases import error

_NUM_PAGES = 40
# By name the heads of keys and of values, their dimensions, and tokens of the convolution.
_SHAPES = {"qwen": (16, 32, 128, 128, 4), "small": (2, 4, 8, 6, 3)}
# Of each row the page that it reads, and its chunks: tokens, and the page that is written behind them.
_RUNS = [
    (0, [(3, 1), (STATE_CHUNK, 0), (STATE_CHUNK, 2), (17, 3)]),
    (4, [(2, 4)]),
    (5, [(STATE_CHUNK, 0), (5, 6)]),
    (7, [(30, 0)]),
]


def cases(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """By name the largest error of each, of outputs and of states."""
    for name, shape in _SHAPES.items():
        if device == "cpu" and name == "qwen":
            continue  # the reference takes tokens one by one
        yield f"delta_decode_{name}", partial(_decode, dtype, device, shape)
        yield f"delta_prefill_{name}", partial(_prefill, dtype, device, shape)
    for length in (128, 20):
        yield f"gated_norm_{length}", partial(_norm, dtype, device, length)


def _decode(dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> float:
    """17 rows, among them one without a page and one that goes over to its next page."""
    reads = torch.arange(17)
    writes = reads.clone()
    writes[5] = 30
    return _compare(delta_decode, reference.delta_decode, dtype, device, shape, 17, StateRows(None, reads, writes))


def _prefill(dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> float:
    chunks = [(row, count, page) for row, (_, of_row) in enumerate(_RUNS) for count, page in of_row]
    rows, lens, pages = (torch.tensor(column) for column in zip(*chunks, strict=True))
    starts = torch.tensor([0, *(len(of_row) for _, of_row in _RUNS)]).cumsum(0)
    reads = torch.tensor([read for read, _ in _RUNS])
    found = StateChunks(reads, starts, rows, lens.cumsum(0) - lens, lens, pages)
    return _compare(delta_prefill, reference.delta_prefill, dtype, device, shape, int(lens.sum()), found)


def _compare(
    op: Callable[..., None],
    oracle: Callable[..., None],
    dtype: torch.dtype,
    device: str,
    shape: tuple[int, ...],
    num_tokens: int,
    rows: StateRows | StateChunks,
) -> float:
    keys, values, key_dim, value_dim, kernel = shape
    channels = 2 * keys * key_dim + values * value_dim
    mixed, gates = torch.randn(num_tokens, channels + 8).to(dtype), torch.randn(num_tokens, 2 * values + 8).to(dtype)
    inputs = DeltaInputs(
        mixed[:, :channels],
        gates[:, : 2 * values],
        torch.randn(channels, kernel).to(dtype),
        torch.randn(values),
        torch.rand(values) * 4 - 4,  # so that a state is remembered
    )
    memory = torch.randn(_NUM_PAGES, 2, values, key_dim, value_dim)
    window = torch.randn(_NUM_PAGES, 2, kernel - 1, channels).to(dtype)
    memory[0], window[0] = float("nan"), float("nan")  # page 0 is read as zeros
    there = [part.to(device).clone() for part in (memory, window)]
    out, expected = (torch.zeros(num_tokens, values, value_dim, dtype=dtype) for _ in range(2))
    out = out.to(device)
    op(
        DeltaInputs(
            mixed.to(device)[:, :channels], gates.to(device)[:, : 2 * values], *(each.to(device) for each in inputs[2:])
        ),
        DeltaState(there[0][:, 1], there[1][:, 1]),
        rows._replace(**{name: each.to(device) for name, each in rows._asdict().items() if each is not None}),
        out,
    )
    oracle(inputs, DeltaState(memory[:, 1], window[:, 1]), rows, expected)
    return max(error(out, expected), *(error(own[1:], part[1:]) for own, part in zip(there, (memory, window), strict=True)))


def _norm(dtype: torch.dtype, device: str, length: int) -> float:
    x, gate, weight = (
        torch.randn(33, 5, length).to(dtype),
        torch.randn(33, 5 * length + 8).to(dtype)[:, 8:],
        torch.randn(length),
    )
    weight = weight.to(dtype)
    expected = reference.gated_norm(x, gate, weight, 1e-6)
    return (
        error(gated_norm(x.to(device), gate.to(device), weight.to(device), 1e-6), expected) / 2
    )  # products of two of order one
