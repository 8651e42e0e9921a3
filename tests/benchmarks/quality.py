"""What a way of computing costs in exactness: logits on held-out text, against torch in float32.

The demo model reads Python modules that it was not trained on, in pieces of one length, every token given (teacher-forced), in
chunks as the engine computes a prompt. The same greedy token means that the likeliest next token is the same; bits are those
of the true next token.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast
from unittest.mock import patch

import numpy as np
import torch
from tqdm import tqdm

from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.model import loader
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.model.dtype_name import FLOAT8, DtypeChoice
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.kernels.cpu import compiled
from tests.support.models import demo_corpus as corpus

_PIECE, _CHUNK, _NUM_PIECES, _BLOCK_SIZE = 512, 128, 24, 16
_WAYS = (("float32", True), ("int8", True), ("int4", True), ("bfloat16", False), ("bfloat16", True), ("fp8", False))


def figures() -> Iterator[dict[str, object]]:
    pieces = _pieces()
    exact = _logits("float32", pieces, is_compiled=False)
    truth = torch.from_numpy(np.concatenate([piece[1:] for piece in pieces]))
    for dtype, is_compiled in tqdm(_WAYS, desc="quality", file=sys.stderr):
        found = _logits(dtype, pieces, is_compiled=is_compiled)
        yield {
            "dtype": dtype,
            "kernels": "compiled" if is_compiled else "torch",
            "tokens": len(truth),
            "relative_error": float(f"{(found - exact).norm() / exact.norm():.2e}"),
            "greatest_error": float(f"{(found - exact).abs().max():.2e}"),
            "same_greedy_token": round(float((found.argmax(1) == exact.argmax(1)).float().mean()), 4),
            "bits_per_token": round(_bits(found, truth), 4),
            "baseline": "float32 with torch's kernels",
            "baseline_bits_per_token": round(_bits(exact, truth), 4),
        }


def _bits(logits: torch.Tensor, truth: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits, truth)) / math.log(2)


def _pieces() -> list[np.ndarray]:
    """int64 [_PIECE] each, from the beginnings of the held-out modules."""
    tokenizer = Tokenizer.load(DEMO_MODEL_DIR)
    pieces = []
    for module in corpus.held_out_modules():
        tokens = np.array(tokenizer.encode(module.text), np.int64)
        if len(tokens) >= _PIECE:
            pieces.append(tokens[:_PIECE])
    return pieces[:_NUM_PIECES]


def _logits(dtype: str, pieces: list[np.ndarray], *, is_compiled: bool) -> torch.Tensor:
    """float32 [pieces * (_PIECE - 1), vocab_size], of all tokens that have a next one."""
    compiled.switch(on=is_compiled)
    with ExitStack() as stack:
        if dtype == FLOAT8:  # which the engine has on a device alone
            stack.enter_context(patch.object(loader, "compute_dtype", return_value=torch.bfloat16))
        model, _ = load_model(DEMO_MODEL_DIR, dtype=cast(DtypeChoice, dtype), progress=False)
    layout = make_kv_layout(model.config, model.dtype, _BLOCK_SIZE)
    num_blocks = _PIECE // _BLOCK_SIZE
    memory = torch.zeros((1 + num_blocks) * layout.block_bytes, dtype=torch.uint8)
    runner = ModelRunner(model, layout.view(memory), layout)
    table = np.arange(1, 1 + num_blocks, dtype=np.int32)
    found = [
        runner.forward(_chunk(piece, first, table))[: _PIECE - 1 - first]
        for piece in pieces
        for first in range(0, _PIECE, _CHUNK)
    ]
    compiled.switch(on=False)
    return torch.cat(found)


def _chunk(piece: np.ndarray, first: int, table: np.ndarray) -> Batch:
    positions = np.arange(first, first + _CHUNK)
    return Batch(
        token_ids=piece[positions],
        positions=positions,
        slot_mapping=table[positions // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + positions % _BLOCK_SIZE,
        query_start_loc=np.array([0, _CHUNK], np.int32),
        seq_lens=np.array([first + _CHUNK], np.int32),
        block_tables=table[None],
        logit_rows=np.arange(_CHUNK),
        logit_start_loc=np.array([0, _CHUNK], np.int32),
    )
