"""Cases of part b for layers with states in pages, of released shapes and of small ones."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.recurrent.delta_rule import delta_decode, delta_prefill
from kvkeeper.kernels.recurrent.gated_norm import gated_norm
from kvkeeper.kernels.recurrent.short_conv import short_conv
from kvkeeper.kernels.types import (
    STATE_CHUNK,
    ChannelRule,
    ConvInputs,
    DeltaInputs,
    DeltaState,
    ScanRule,
    StateChunks,
    StateRows,
)
from tests.gpu.kernel_cases import error

_NUM_PAGES = 40
# By name the heads of keys and of values, their dimensions, tokens of the convolution, and what forgets: a head, a head of
# Mamba 2, or each dimension, perhaps within bounds.
_SHAPES = {
    "qwen": (16, 32, 128, 128, 4, "head"),
    "small": (2, 4, 8, 6, 3, "head"),
    "nemotron": (8, 64, 128, 64, 4, "scan"),
    "small_scan": (2, 4, 8, 6, 3, "scan"),
    "kimi": (32, 32, 128, 128, 4, "channels"),
    "ling": (32, 32, 128, 128, 4, "bounded"),
    "small_channels": (3, 3, 8, 6, 3, "channels"),
}
# 17 rows, among them one without a page and one that goes over to its next page.
_ROWS = StateRows(None, torch.arange(17), torch.arange(17).where(torch.arange(17) != 5, 30))
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
        if device == "cpu" and name in ("qwen", "nemotron", "kimi", "ling"):
            continue  # the reference takes tokens one by one
        yield f"delta_decode_{name}", partial(_decode, dtype, device, shape)
        yield f"delta_prefill_{name}", partial(_prefill, dtype, device, shape)
    for channels, kernel in ((2048, 3), (70, 4)):
        yield f"short_conv_decode_{channels}", partial(_convolve, dtype, device, channels, kernel, _ROWS)
        yield f"short_conv_prefill_{channels}", partial(_convolve, dtype, device, channels, kernel, _make_chunks())
    for length in (128, 20):
        yield f"gated_norm_{length}", partial(_norm, dtype, device, length)


def _decode(dtype: torch.dtype, device: str, shape: tuple[Any, ...]) -> float:
    return _compare(delta_decode, reference.delta_decode, dtype, device, shape, 17, _ROWS)


def _prefill(dtype: torch.dtype, device: str, shape: tuple[Any, ...]) -> float:
    chunks = _make_chunks()
    return _compare(delta_prefill, reference.delta_prefill, dtype, device, shape, int(chunks.lens.sum()), chunks)


def _make_chunks() -> StateChunks:
    chunks = [(row, count, page) for row, (_, of_row) in enumerate(_RUNS) for count, page in of_row]
    rows, lens, pages = (torch.tensor(column) for column in zip(*chunks, strict=True))
    starts = torch.tensor([0, *(len(of_row) for _, of_row in _RUNS)]).cumsum(0)
    reads = torch.tensor([read for read, _ in _RUNS])
    return StateChunks(reads, starts, rows, lens.cumsum(0) - lens, lens, pages)


def _convolve(dtype: torch.dtype, device: str, channels: int, kernel: int, rows: StateRows | StateChunks) -> float:
    num_tokens = 17 if isinstance(rows, StateRows) else int(rows.lens.sum())
    inputs = ConvInputs(
        *(torch.randn(*size).to(dtype) for size in ((num_tokens, 3 * channels), (channels, kernel), (channels,)))
    )
    window = torch.randn(_NUM_PAGES, 2, kernel - 1, channels).to(dtype)
    window[0] = float("nan")  # page 0 is read as zeros
    there, out, expected = window.to(device).clone(), *(torch.zeros(num_tokens, channels, dtype=dtype) for _ in range(2))
    out = out.to(device)
    short_conv(ConvInputs(*(each.to(device) for each in inputs if each is not None)), there[:, 1], _moved(rows, device), out)
    reference.short_conv(inputs, window[:, 1], rows, expected)
    return max(error(out, expected) / 4, error(there[1:], window[1:]))  # products of three of order one


def _moved(rows: StateRows | StateChunks, device: str) -> Any:
    return rows._replace(**{name: each.to(device) for name, each in rows._asdict().items() if each is not None})


def _compare(
    op: Callable[..., None],
    oracle: Callable[..., None],
    dtype: torch.dtype,
    device: str,
    shape: tuple[Any, ...],
    num_tokens: int,
    rows: StateRows | StateChunks,
) -> float:
    keys, values, key_dim, value_dim, kernel, kind = shape
    is_scan, num_biases = kind == "scan", values * key_dim if kind in ("channels", "bounded") else values
    channels, num_gates = 2 * keys * key_dim + values * value_dim, 2 * values if kind == "head" else values
    mixed, gates = torch.randn(num_tokens, channels + 8).to(dtype), torch.randn(num_tokens, num_gates + 8).to(dtype)
    if is_scan:  # whose keys and queries have the length that they have
        mixed /= key_dim**0.5
    scan = ScanRule(torch.randn(channels).to(dtype), torch.randn(values), 0.4, 1.3) if is_scan else None
    rule = None
    if num_biases > values:
        rule = ChannelRule(torch.randn(num_tokens, num_biases).to(dtype), -5.0 if kind == "bounded" else None)
    inputs = DeltaInputs(
        mixed[:, :channels],
        gates[:, :num_gates],
        torch.randn(channels, kernel).to(dtype),
        torch.randn(num_biases),
        torch.rand(values) * 4 - 4,  # so that a state is remembered
        scan,
        rule,
    )
    memory = torch.randn(_NUM_PAGES, 2, values, key_dim, value_dim)
    window = torch.randn(_NUM_PAGES, 2, kernel - 1, channels).to(dtype)
    memory[0], window[0] = float("nan"), float("nan")  # page 0 is read as zeros
    there = [part.to(device).clone() for part in (memory, window)]
    out, expected = (torch.zeros(num_tokens, values, value_dim, dtype=dtype) for _ in range(2))
    out = out.to(device)
    op(
        DeltaInputs(
            mixed.to(device)[:, :channels],
            gates.to(device)[:, :num_gates],
            inputs.conv.to(device),
            inputs.decay_bias.to(device),
            inputs.decay_log.to(device),
            scan and scan._replace(conv_bias=scan.conv_bias.to(device), skip=scan.skip.to(device)),
            rule and rule._replace(gates=rule.gates.to(device)),
        ),
        DeltaState(there[0][:, 1], there[1][:, 1]),
        _moved(rows, device),
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
