"""Decoders whose K and V are stored in fewer bits, against the same decoders that round K and V so and keep them as numbers."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.compute.stored_model import stored_layout
from kvkeeper.engine_service.model import decoder
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.stored_attention import MOST_TAILS, count_tail_layers
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.activations.rotary import rotary
from kvkeeper.kernels.quantised.formats import FORMATS, dequantise, quantise
from kvkeeper.kernels.quantised.layout import QuantisedLayout
from kvkeeper.kernels.store_kv import store_kv
from tests.support.models.tiny_models import TinyModel, build_model_folder, random_tokens

pytestmark = pytest.mark.usefixtures("kernel_path")
SIZE, LENGTH = 4, 22
MODELS = [
    TinyModel("stored_qwen3", "Qwen3", {"num_hidden_layers": 3}),
    TinyModel("stored_gemma2", "Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}),
    TinyModel("stored_gpt_oss", "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), request.param)


def batch_of(text: np.ndarray, first: int, last: int, tables: np.ndarray, *, tail_from: int) -> Batch:
    """Tokens [first, last) of a text, and the first of them in a sequence of its own, whose other tokens stay zeros.

    tables: [groups, 2, entries]; entries of groups behind the first from tail_from on.
    """
    tables = tables.copy()
    tables[1:, :, :tail_from] = 0
    ranges = [(first, last), (first, first + 1)]
    positions = np.concatenate([np.arange(start, end) for start, end in ranges])
    owners = np.repeat(np.arange(2), [end - start for start, end in ranges])
    slots = tables[:, owners, positions // SIZE].astype(np.int64) * SIZE + positions % SIZE
    counts = [end - start for start, end in ranges]
    batch = Batch(
        token_ids=text[positions],
        positions=positions,
        slot_mapping=slots[0],
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([end for _, end in ranges], np.int32),
        block_tables=tables[0],
        logit_rows=np.arange(sum(counts)),
        logit_start_loc=np.cumsum([0, *counts]).astype(np.int32),
    )
    if len(tables) == 1:
        return batch
    return dataclasses.replace(batch, group_tables=np.ascontiguousarray(tables[1:].swapaxes(0, 1)), group_slots=slots[1:])


def logits_of(runner: ModelRunner, num_groups: int, tail_from: int = 0) -> torch.Tensor:
    """Of all tokens: a prompt, then a chunk beside a token of another sequence, then tokens one by one."""
    text = np.array(random_tokens(LENGTH, seed=3), np.int64)
    entries = -(-LENGTH // SIZE)
    tables = np.arange(1, 1 + num_groups * 2 * entries, dtype=np.int32).reshape(num_groups, 2, entries)
    found, bounds = [], (0, 9, 10, 17, *range(18, LENGTH + 1))
    for first, last in itertools.pairwise(bounds):
        found.append(runner.forward(batch_of(text, first, last, tables, tail_from=min(tail_from, first // SIZE))).clone())
    return torch.cat(found)


def runner_of(folder: Path, name: str | None, tail_tokens: int = 0) -> tuple[ModelRunner, int]:
    model, config = load_model(folder, progress=False)
    if name is None:
        layout, groups = make_kv_layout(config, model.dtype, SIZE), ()
    else:
        layout, groups = stored_layout(model, FORMATS[name], SIZE, tail_tokens)
    num_groups = max(len(groups), 1)
    memory = torch.zeros((1 + num_groups * 2 * -(-LENGTH // SIZE)) * layout.block_bytes, dtype=torch.uint8)
    return ModelRunner(model, layout.view(memory), layout, groups), num_groups


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "bf16"])
def test_logits_are_those_of_rounded_k_and_v(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = logits_of(*runner_of(folder, name))

    def rounded(qk, v, cos, sin, kv_layer, slots, plan, norm):
        num_kv_heads = v.shape[1]
        if norm is not None:
            qk, _ = rms_norm(qk, *norm)
        qk = rotary(qk, cos, sin)
        k, v = (dequantise(*quantise(x, FORMATS[name]), FORMATS[name], x.dtype) for x in (qk[:, -num_kv_heads:], v))
        store_kv(k, v, kv_layer, slots, plan)
        return qk[:, :-num_kv_heads]

    plain = logits_of(*runner_of(folder, None))
    monkeypatch.setattr(decoder, "rotary_store_kv", rounded)
    expected = logits_of(*runner_of(folder, None))
    assert float((found - plain).abs().max()) > 1e-4
    # A tie of rounding may fall the other way where a number differs in its last bit, and then by a step of that head.
    assert float((found - expected).abs().median()) < 1e-5 * float(expected.abs().max())
    assert float((found - expected).abs().max()) < 0.3 * float((found - plain).abs().max())


def test_a_tail_that_has_all_tokens_leaves_nothing_rounded(folder: Path) -> None:
    plain = logits_of(*runner_of(folder, None))
    torch.testing.assert_close(logits_of(*runner_of(folder, "int4", 64)), plain, rtol=1e-4, atol=1e-5)
    half = logits_of(*runner_of(folder, "int4", 64), tail_from=2)
    rounded = logits_of(*runner_of(folder, "int4"))
    torch.testing.assert_close(half[:10], plain[:10], rtol=1e-4, atol=1e-5)  # before entries are read as they are stored
    assert 0 < float((half - plain).norm()) < float((rounded - plain).norm())


@pytest.mark.parametrize(
    ("name", "dtype", "most"), [("int8", torch.bfloat16, 0.57), ("int4", torch.bfloat16, 0.33), ("int8", torch.float32, 0.4)]
)
def test_a_long_sequence_takes_few_bytes_with_a_tail(name: str, dtype: torch.dtype, most: float) -> None:
    """Of 4,096 tokens in the model's own type, for the shape of a model of 8 billion parameters."""
    layout = QuantisedLayout(32, 8, 128, 16, FORMATS[name], dtype)
    count = count_tail_layers(layout, 256)
    num_tails = -(-32 // count)
    assert num_tails <= MOST_TAILS
    window, size = 256 - 16 + 1, dataclasses.replace(layout, tail_layers=count).block_bytes
    held = 4096 // 16 - (4096 - window + 1) // 16
    assert size * (4096 // 16 + num_tails * held) / (4096 * 32 * 2 * 8 * 128 * dtype.itemsize) <= most
