"""After the warm-up no step of an engine compiles a kernel, by the key under which Triton looks kernels up.

No kernel is run: which ones are launched, and with what, follows from shapes alone.
"""

import dataclasses
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from kvkeeper.engine_service import server
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds, make_kv_layout
from kvkeeper.engine_service.compute.sampler import sample
from kvkeeper.engine_service.compute.self_check import load_checked_model
from kvkeeper.engine_service.compute.served_model import _ready_on_device, _refuses_retention, load_served_model
from kvkeeper.engine_service.compute.stored_model import stored_layout
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.experts import ExpertWeights
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.ranks import block_copies
from kvkeeper.engine_service.ranks.block_copies import SWAP_OUT, BlockMover, SmallCopies, copy_spans
from kvkeeper.engine_service.values.batch import Batch, BatchRetention
from kvkeeper.engine_service.values.sampling_params import SamplingRow
from kvkeeper.kernels.quantised.formats import FORMATS
from tests.support.models.tiny_models import TinyModel, build_model_folder, tiny_model
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch
from tests.unit.kernels.gpu.captured import WAYS, all_claim_to_be_on_cuda
from tests.unit.kernels.gpu.pretend import on_cuda, pretend_weights_on_cuda
from tests.unit.kernels.gpu.specialised import note_launches

__all__ = ["all_claim_to_be_on_cuda"]  # a fixture of the tests here

BLOCK_SIZE, NUM_BLOCKS = 16, 8
MOST_TOKENS, BUDGET, MOST_ROWS = 8192, 2048, 64
PACKED = ExpertWeights.packed  # before it is replaced for models that are loaded on the CPU
TABLE = np.zeros(MOST_TOKENS // BLOCK_SIZE, np.int32)


def like(name, **overrides):
    """The tiny model of this name, of which a sequence may be long."""
    model = tiny_model(name)
    return TinyModel(name, model.family, model.overrides | {"max_position_embeddings": MOST_TOKENS, **overrides})


OSS = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
# Heads and experts are those of real models: Llama 70B, Command R+, gpt-oss, Mixtral, Qwen3-30B-A3B, Llama 4. The last layer
# computes few tokens of a step, so that experts have to be in another one as well. LIBRARY is computed by transformers. STORED
# has K and V in 8 bits, with a tail, and INTEGERS weights of 4 bits.
MODELS = [
    like("llama"),
    like("llama", num_attention_heads=64, num_key_value_heads=8),
    like("llama", hidden_size=192, num_attention_heads=96, num_key_value_heads=8),
    like("gemma2", sliding_window=2048),
    like("gpt_oss", num_attention_heads=64, num_key_value_heads=8, **OSS),
    like("mixtral", num_local_experts=8, num_experts_per_tok=2),
    like("qwen3_moe", num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8),
    like("llama4", attention_chunk_size=2048, num_local_experts=16, num_experts_per_tok=1),
    LIBRARY := like("qwen3", num_attention_heads=32),
    like("deepseek_v3", num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=16),
    STORED := like("llama", num_attention_heads=32, num_key_value_heads=4),
    INTEGERS := like("qwen3_moe", num_attention_heads=32, num_key_value_heads=8, num_experts=32, num_experts_per_tok=4),
]  # fmt: skip
IDS = [f"{model.name} {model.overrides.get('num_attention_heads', '')}".strip() for model in MODELS]


@pytest.fixture(params=MODELS, ids=IDS)
def runner(request, tmp_path, monkeypatch):
    for kernels in ("decode_work", "paged_attention_prefill"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{kernels}.num_multiprocessors", lambda device: 132)
    folder, options = build_model_folder(tmp_path, request.param), {"device": torch.device("cpu"), "progress": False}
    if request.param is LIBRARY:
        model = load_checked_model(folder, "qwen3", "float32", **options)
    elif request.param is INTEGERS:
        monkeypatch.setattr(ExpertWeights, "packed", PACKED)
        pretend_weights_on_cuda(monkeypatch)
        model = load_model(folder, dtype="int4", **options)[0]
    else:
        model = load_model(folder, **options)[0]
    layout, groups = make_kv_layout(model.config, model.dtype, BLOCK_SIZE), ()
    if request.param is STORED:
        layout, groups = stored_layout(model, FORMATS["int8"], BLOCK_SIZE, 256)
    view = layout.view(torch.zeros(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8))
    return ModelRunner(model, on_cuda(view)[0], layout, groups)


def step(*rows, want=WantLogits.LAST) -> Batch:
    """A batch of rows: new tokens, and those before them."""
    return build_batch([ScheduledRow((1,) * count, context, TABLE, want) for count, context in rows], BLOCK_SIZE)


def steps() -> Iterator[Batch]:
    """Steps as they come: decodes, prompts behind what is cached and without it, both at once, guesses that are checked."""
    for count, context in product((1, 2, 3, 15, 16, 33, MOST_ROWS), (0, 1, 15, 300, 8000)):
        yield step(*[(1, context)] * count)
    for count, context in product((2, 3, 6, 9, 11, 13, 22, 33, 65, 129, 500), (0, 100, 5000)):
        yield step((count, context))
    for count, context in product((2, 11, 65, 257), (0, 5000)):
        yield step((1, 10), (count, context), (1, context))
    for count, length, context in product((2, 7, MOST_ROWS), (2, 11, 32), (0, 2040)):
        yield step(*[(length, context)] * count)
    for count, context in product((1, BUDGET // 4, BUDGET // 2, BUDGET), (0, 3000)):
        yield step(*[(1, 0)] * MOST_ROWS, (count, context))
    for want, count in product((WantLogits.ALL, WantLogits.NONE), (1, 3, 16)):
        yield step(*[(4, 777)] * count, want=want)


def cut(batch: Batch, *, every: int) -> Batch:
    """With a sink and a window in every so many rows."""
    lens = np.where(np.arange(len(batch.seq_lens)) % every, 0, np.maximum(batch.seq_lens // 2, 1)).astype(np.int32)
    return dataclasses.replace(batch, retention=BatchRetention(np.minimum(lens, 4), lens))


def draws(logits: torch.Tensor) -> Iterator[list[SamplingRow]]:
    """Rows as they are drawn, alike and in several ways."""
    history = np.ones(3, np.int32)
    for ways in ([way] for way in WAYS):
        yield [SamplingRow(way, 7, 0, history, 1) for way in ways * len(logits)]
    yield [SamplingRow(WAYS[row % len(WAYS)], 7, row % 2, history, 1) for row in range(len(logits))]
    penalised = dataclasses.replace(WAYS[0], frequency_penalty=0.5)
    yield [SamplingRow(penalised, 7, 0, history, 1)] * len(logits)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_no_kernel_is_compiled_after_the_warm_up(runner, monkeypatch):
    seen = note_launches(monkeypatch)
    with_retention = not (_refuses_retention(runner._model) or runner._stored)
    bounds = StepBounds(MOST_ROWS, MOST_TOKENS, BUDGET + MOST_ROWS)
    runner.make_ready(bounds, None, with_retention=with_retention, progress=False)
    warm = set(seen)
    names = {name for name, _ in warm}
    assert {"copy_blocks_kernel", "sample_kernel"} <= names
    assert {"shared_kernel", "quantised_shared_kernel"} & names or runner._model.config.is_latent
    for pairs in ([(1, 2)], [(1, 2), (3, 4)], [(1, 2), (3, 4), (5, 6)], [(1, 2), (2, 3)]):
        runner.copy_blocks(pairs)
    for batch in steps():
        runner.forward(batch)
        if with_retention:
            for every in (1, 2):
                runner.forward(cut(batch, every=every))
    for count in (1, 2, 3, 16, 33):
        logits = runner.forward(step(*[(1, 5)] * count))
        for rows in draws(logits):
            sample(logits, rows)
    assert sorted(name for name, _ in seen - warm) == []


def test_no_kernel_is_compiled_by_the_guesses_of_a_draft_model(tmp_path, monkeypatch):
    def load(config):
        """As on a device, but for the memory."""
        served = load_served_model(config)
        model = load_model(folder, progress=False)[0]
        made = _ready_on_device(dataclasses.replace(served, device=torch.device("cuda")), config, progress=False).make_ready
        return dataclasses.replace(
            served, make_ready=made, make_runner=lambda view, layout: ModelRunner(model, on_cuda(view)[0], layout)
        )

    for kernels in ("decode_work", "paged_attention_prefill"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{kernels}.num_multiprocessors", lambda device: 132)
    folder = build_model_folder(tmp_path, like("qwen3_moe", num_attention_heads=16, num_experts=128, num_experts_per_tok=1))
    config = EngineConfig(model=str(folder), speculation="draft-model", draft_model=str(folder), cpu_kernels="torch")
    monkeypatch.setattr(server, "load_served_model", load)
    seen = note_launches(monkeypatch)
    with capture_logs() as logs:
        proposer = server._load_proposer(config, load_served_model(config))
    assert "graphs_failed" not in {entry["event"] for entry in logs}, "no graph is tried"
    warm = set(seen)
    assert {"prefill_kernel", "decode_kernel", "grouped_linear_kernel"} <= {name for name, _ in warm}
    for lens in ([1], [40], [600], [3, 2000, 513, 9], [512] * 16, [5000] * 3, [17 * row for row in range(1, 17)]):
        histories = {row: np.ones(length, np.int32) for row, length in enumerate(lens)}
        for ahead in (1, 3):
            guesses = proposer.propose(histories, dict.fromkeys(histories, ahead))
            assert {len(tokens) for tokens in guesses.values()} == {ahead}
    assert sorted(name for name, _ in seen - warm) == []


@pytest.fixture
def tiers(monkeypatch):
    """Blocks of a device, and of a host tier that two ranks share. It is pinned once `is_pinned` is not empty."""
    is_pinned = []
    monkeypatch.setattr(block_copies, "copies_between", lambda *memories: SmallCopies(copy_spans, lambda: bool(is_pinned)))
    device, host = torch.arange(32 * 16, dtype=torch.int32), torch.arange(32 * 2 * 16, dtype=torch.int32)
    blocks = device.view(torch.uint8).view(32, 64), host.view(torch.uint8).view(32, 2, 64)[:, 1]
    return BlockMover(*on_cuda(blocks[0]), blocks[1]), blocks, is_pinned


def test_no_kernel_is_compiled_by_small_swaps(tiers, monkeypatch):
    mover, _, is_pinned = tiers
    seen = note_launches(monkeypatch)
    is_pinned.append(True)
    mover.make_ready()
    warm = set(seen)
    assert len(warm) == 2, "of each direction: a stride of 8 words, and one of 16"
    for count in (15, 16, 17):
        for kind in (SWAP_OUT, SWAP_OUT + 1):
            assert mover.move([(at, kind, at, at) for at in range(1, 1 + count)])[1] == []
    assert seen == warm


def test_a_warm_up_of_swaps_changes_no_block_but_the_null_block_of_the_host(tiers):
    mover, (device, host), is_pinned = tiers
    before = device.clone(), host.clone()
    is_pinned.append(True)
    mover.make_ready()
    assert torch.equal(device, before[0])
    assert torch.equal(host[1:], before[1][1:])
    assert torch.equal(host[0], device[0]), "the kernel ran"
