"""What fewer bits of K and V do to decodes on a processor: tokens a second by context, and the bytes that a sequence takes.

The random Llama of the engine's figures decodes eight sequences of one length, a token each a step, with the compiled kernels,
one thread. Ways take turns in one process; ratios are those of neighbouring turns, and their median is told. K and V are
random.
"""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from kvkeeper.engine_service.compute.model_runner import AnyLayout, ModelRunner, make_kv_layout
from kvkeeper.engine_service.compute.stored_model import stored_layout
from kvkeeper.engine_service.model.decoder import Decoder
from kvkeeper.engine_service.model.layer_groups import LayerGroup
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.quantised.formats import FORMATS, quantise
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer
from tests.benchmarks.llama import build_folder

_CONTEXTS, _NUM_SEQS, _BLOCK_SIZE, _TAIL = (1024, 4096), 8, 16, 256
_WAYS = (("int8", 0), ("int8", _TAIL), ("int4", 0), ("int4", _TAIL), ("fp8", 0), ("bf16", 0))
_ROUNDS, _STEPS, _AIM = 5, 3, 1.3


def figures() -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)
    compiled.switch(on=True)
    with tempfile.TemporaryDirectory() as folder:
        build_folder(Path(folder))
        model, _ = load_model(Path(folder), progress=False)
    for context in _CONTEXTS:
        plain = _Decodes(model, None, 0, context)
        for name, tail in tqdm(_WAYS, desc=f"context {context}", file=sys.stderr):
            stored = _Decodes(model, name, tail, context)
            pairs = [(plain.seconds(), stored.seconds()) for _ in range(_ROUNDS)]
            yield {
                "kv_dtype": name,
                "tail_tokens": tail,
                "context": context,
                "sequences": _NUM_SEQS,
                "tokens_per_second": round(_NUM_SEQS / float(np.median([ours for _, ours in pairs])), 1),
                "baseline": "float32 K and V",
                "baseline_tokens_per_second": round(_NUM_SEQS / float(np.median([theirs for theirs, _ in pairs])), 1),
                "ratio": round(float(np.median([theirs / ours for theirs, ours in pairs])), 2),
                "aim": _AIM if (name, tail) == ("int8", 0) else None,
                "bytes_ratio": round(stored.bytes_held / plain.bytes_held, 3),
            }
    compiled.switch(on=False)


class _Decodes:
    """Steps that decode at one length of the context."""

    def __init__(self, model: Decoder, name: str | None, tail_tokens: int, context: int) -> None:
        entries, config = -(-(context + 1) // _BLOCK_SIZE), model.config
        groups: tuple[LayerGroup, ...] = ()
        layout: AnyLayout = make_kv_layout(config, model.dtype, _BLOCK_SIZE)
        if name is not None:
            layout, groups = stored_layout(model, FORMATS[name], _BLOCK_SIZE, tail_tokens)
        num_groups = max(len(groups), 1)
        tables = np.arange(1, 1 + num_groups * _NUM_SEQS * entries, dtype=np.int32).reshape(num_groups, _NUM_SEQS, entries)
        if groups:
            tables[1:, :, : (context - (groups[1].window or 0) + 1) // _BLOCK_SIZE] = 0
        memory = torch.zeros((1 + tables.max()) * layout.block_bytes, dtype=torch.uint8)
        view = layout.view(memory)
        _fill(view, layout, 1 + _NUM_SEQS * entries)
        self.bytes_held = int(np.count_nonzero(tables)) * layout.block_bytes
        self._runner = ModelRunner(model, view, layout, groups)
        slots = tables[:, :, context // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + context % _BLOCK_SIZE
        ones = np.arange(_NUM_SEQS + 1, dtype=np.int32)
        self._batch = Batch(
            token_ids=np.full(_NUM_SEQS, 5, np.int64),
            positions=np.full(_NUM_SEQS, context, np.int64),
            slot_mapping=slots[0],
            query_start_loc=ones,
            seq_lens=np.full(_NUM_SEQS, context + 1, np.int32),
            block_tables=tables[0],
            logit_rows=np.arange(_NUM_SEQS),
            logit_start_loc=ones,
        )
        if groups:
            others = np.ascontiguousarray(tables[1:].swapaxes(0, 1))
            self._batch = dataclasses.replace(self._batch, group_tables=others, group_slots=slots[1:])
        self._runner.forward(self._batch)

    def seconds(self) -> float:
        """Of a step; the best of a few, because the machine may be shared."""
        found = []
        for _ in range(_STEPS):
            started = time.perf_counter()
            self._runner.forward(self._batch)
            found.append(time.perf_counter() - started)
        return min(found)


def _fill(view: torch.Tensor, layout: AnyLayout, num_stored: int) -> None:
    """Random K and V in the first blocks, and numbers in the pages behind them."""
    if not isinstance(layout, QuantisedLayout):
        view.normal_()
        return
    if layout.tail_layers:
        view[num_stored:].view(layout.dtype).normal_()
    numbers = torch.randn(2, layout.block_size, layout.num_kv_heads, layout.head_dim)
    elements, scales = quantise(numbers, layout.kv_format)
    for index in range(layout.num_layers):
        layer = get_layer(view, layout, index)
        layer.elements[:num_stored] = elements
        if layout.kv_format.scale_bytes:
            layer.scales[:num_stored] = scales
