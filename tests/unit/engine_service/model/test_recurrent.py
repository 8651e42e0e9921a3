"""States in pages: checkpoints inside long steps, pages that are given back, what a block must hold, and what is refused."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.model_runner import StepBounds
from kvkeeper.engine_service.model.checkpoint.errors import ModelError, UnsupportedModelError
from kvkeeper.engine_service.model.config import parse_model_config
from kvkeeper.engine_service.model.decoder import Decoder
from kvkeeper.engine_service.model.layer_groups import LayerGroup, group_states
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.recurrent.delta_config import DeltaNetShape
from kvkeeper.engine_service.model.recurrent.recurrent_config import state_bytes
from kvkeeper.engine_service.model.recurrent.state_pages import state_arrays
from kvkeeper.kernels.cpu import compiled
from tests.support.models.tiny_models import (
    NumericsCase,
    ReferenceLogits,
    build_model_folder,
    numerics_cases,
    random_tokens,
    reference_logits,
    tiny_model,
)
from tests.support.worlds.batches import ScheduledRow, build_batch
from tests.support.worlds.hand_tables import HandTables

torch.set_num_threads(1)
SIZE = 4


@pytest.fixture(scope="module", params=["kimi_linear", "ling_3", "nemotron_3_nano", "qwen3_5_27b", "qwen3_5_35b_a3b"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), tiny_model(request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_model(folder, progress=False)[0]


CASES = (*numerics_cases(SIZE), NumericsCase(random_tokens(50, seed=9)), NumericsCase(random_tokens(3), preempt_at=2))


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceLogits:
    return reference_logits(folder, CASES)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("checkpoint_blocks", [2, 3, 100])
def test_pages_of_checkpoints_and_of_the_last_token_are_enough(
    model: Decoder, reference: ReferenceLogits, checkpoint_blocks: int, chunk_size: int
) -> None:
    tables = HandTables(model, SIZE, checkpoint_blocks=checkpoint_blocks)
    assert reference.error(tables.compute(CASES, chunk_size)) <= reference.bound


def test_a_state_that_is_not_the_one_behind_the_hit_shows(model: Decoder, reference: ReferenceLogits) -> None:
    """The page of the next entry, whose state knows tokens that are computed again."""
    (index,) = [at for at, case in enumerate(CASES) if case.hit_len == 2 * SIZE]
    shared = CASES[index].hit_len

    class Late(HandTables):
        def table_for(self, case: NumericsCase, parent_tables: np.ndarray) -> tuple[np.ndarray, int]:
            tables, found = super().table_for(case, parent_tables)
            if found == shared:
                tables[1:, found // SIZE - 1] = parent_tables[1:, found // SIZE]
            return tables, found

    errors = (Late(model, SIZE, num_blocks=400).compute(CASES, 64)[index] - reference.eager[index]).abs().amax(1)
    assert float(errors[:shared].max()) <= reference.bound
    assert float(errors[shared:].min()) > 100 * reference.bound


def test_chunks_end_where_a_block_has_a_page_and_behind_so_many_tokens() -> None:
    table = np.arange(1, 60, dtype=np.int32)
    rows = [ScheduledRow(range(20), 6, table), ScheduledRow([0], 3, table), ScheduledRow(range(2), 7, table)]
    rows.append(ScheduledRow(range(150), 2, table))
    batch = build_batch(rows, SIZE)
    tables = np.zeros((4, 2, batch.block_tables.shape[1]), np.int32)
    tables[0, 1, [0, 1, 3, 6]] = [9, 5, 6, 7]
    tables[1:3, 1, :3] = [1, 2, 3]
    tables[3, 1, [0, 17, 37]] = [3, 4, 5]  # after 2 tokens, after 70, and at the end
    found = state_arrays(dataclasses.replace(batch, group_tables=tables), [2], SIZE)
    assert {name: column.tolist() for name, column in found.items()} == {
        "state_chunk_starts": [0, 3, 5, 10],
        "state_chunk_rows": [0, 0, 0, 1, 1, 2, 2, 2, 2, 2],
        "state_chunk_firsts": [0, 2, 10, 21, 22, 23, 25, 89, 93, 157],
        "state_chunk_lens": [2, 8, 10, 1, 1, 2, 64, 4, 64, 16],
        "state_reads_2": [1],
        "state_writes_2": [1],
        "state_chunk_reads_2": [5, 2, 3],
        "state_chunk_writes_2": [5, 6, 7, 2, 3, 3, 0, 4, 0, 5],
    }
    first = state_arrays(batch, [1, 2], SIZE)
    assert first["state_chunk_lens"].tolist() == [20, 2, 64, 64, 22]
    assert not any(first[f"state_{name}_2"].any() for name in ("reads", "writes", "chunk_reads", "chunk_writes"))


def test_a_token_without_a_page_is_no_step(model: Decoder) -> None:
    tables = HandTables(model, SIZE)
    own = np.ones((1 + tables.num_state_groups, 2), np.int32)
    own[2, 1] = 0
    with pytest.raises(AssertionError, match="grants a page"):
        tables.runner.forward(tables.batch_of([ScheduledRow(range(6), 0, own[0])], [own]))


# Of released models in 16 bit: layers, one of which in four attends; heads of keys and of values of states; heads of K and V.
RELEASED = {
    "Qwen3-Next-80B-A3B": (48, 16, 32, 2, 88, ((88, [1] * 36), (350, [4] * 9), (528, [6] * 6), (1024, [9] * 4))),
    "Qwen3.5-0.8B": (24, 16, 16, 2, 89, ((89, [1] * 18), (1024, [9] * 2))),
    "Qwen3.6-27B": (64, 16, 48, 4, 98, ((98, [2] * 24), (1024, [16] * 3))),
    "Qwen3.6-35B-A3B": (40, 16, 32, 2, 105, ((105, [1] * 30), (1024, [8, 8, 8, 6]))),
}


@pytest.mark.parametrize("name", RELEASED)
def test_layers_with_states_come_in_as_few_groups_as_fit(name: str) -> None:
    num_layers, num_keys, num_values, kv_heads, least, fitting = RELEASED[name]
    recurrent = [layer for layer in range(num_layers) if (layer + 1) % 4]
    num_bytes = state_bytes(DeltaNetShape(num_keys, num_values, 128, 128, 4).state, 2)
    token_bytes = 2 * kv_heads * 256 * 2
    for too_small in (16, least - 1):
        with pytest.raises(UnsupportedModelError, match=rf"--block-size {too_small} .* {least} or more: a block holds"):
            group_states(recurrent, num_layers, num_bytes, token_bytes, too_small, 1)
    for block_size, sizes in fitting:
        first, *others = group_states(recurrent, num_layers, num_bytes, token_bytes, block_size, 3)
        assert first == LayerGroup(tuple(range(3, num_layers, 4)), None)
        assert [len(group.layers) for group in others] == sizes
        assert [layer for group in others for layer in group.layers] == recurrent
        assert {group.checkpoint_blocks for group in others} == {3}
        assert [group.state_bytes for group in others] == [size * num_bytes for size in sizes]
        assert len(others) < 40


RAW = {
    "model_type": "qwen3_next",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 4,
}


def test_a_config_that_says_little_means_what_the_family_has() -> None:
    config = parse_model_config(RAW)
    assert config.recurrent is not None
    assert config.recurrent.layers == {0, 1, 2}
    assert config.recurrent.shape == DeltaNetShape(16, 32, 128, 128, 4)
    assert (config.head_dim, config.rope.part, config.norm_offset, config.has_output_gate) == (256, 0.25, True, True)
    other = parse_model_config(RAW | {"full_attention_interval": 2}).recurrent
    assert other is not None
    assert other.layers == {0, 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_key_heads": 3}, "3 does not divide 32 heads of values"),
        ({"linear_conv_kernel_dim": 1}, "must be 2 or more"),
        ({"layer_types": ["full_attention"]}, "a list of 4"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer type 'sliding_attention' is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "models with a layer of full attention"),
        ({"num_hidden_layers": 3}, "models with a layer of full attention"),
    ],
)
def test_layers_that_cannot_be_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_model_config(RAW | changes)


def test_a_warm_up_changes_no_state(model: Decoder) -> None:
    tables = HandTables(model, SIZE, num_blocks=40, fill=0.0)
    tables.runner.make_ready(StepBounds(2, 64), None, with_retention=False, progress=False)
    assert not tables.view.any()


def test_there_may_be_a_group_for_each_of_many_layers(tmp_path: Path) -> None:
    kind = tiny_model("qwen3_next")
    layers = ["linear_attention"] * 20 + ["full_attention"]
    changes = {"num_hidden_layers": len(layers), "layer_types": layers}
    folder = build_model_folder(tmp_path, dataclasses.replace(kind, overrides=kind.overrides | changes))
    cases = [NumericsCase(random_tokens(2 * SIZE + 1))]
    tables = HandTables(load_model(folder, progress=False)[0], SIZE)
    assert tables.num_state_groups == 20
    reference = reference_logits(folder, cases)
    assert reference.error(tables.compute(cases, 5)) <= 1e-4  # of 20 layers that round one behind the other


@pytest.fixture
def kernels() -> Iterator[None]:
    pytest.importorskip("numba")
    compiled.switch(on=True)
    yield
    compiled.switch(on=False)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["lfm2", "nemotron_h_biased", "nemotron_3_nano", "qwen3_next"])
def test_decodes_are_programs_with_the_numbers_of_plain_passes(name: str, tmp_path: Path) -> None:
    own = load_model(build_model_folder(tmp_path, tiny_model(name)), progress=False)[0]
    cases = [case for case in CASES if not case.preempt_at]
    plain, recorded = (HandTables(own, SIZE, checkpoint_blocks=2, num_blocks=400) for _ in range(2))
    plain.runner.programs = None
    for found, expected in zip(recorded.compute(cases, 1), plain.compute(cases, 1), strict=True):
        assert torch.equal(found, expected)
    assert recorded.runner.programs is not None
    assert recorded.runner.programs.num_runs > 10


@pytest.mark.usefixtures("kernels")
def test_compiled_kernels_compute_what_transformers_does(model: Decoder, reference: ReferenceLogits) -> None:
    for chunk_size in (1, 5, 64):
        assert reference.error(HandTables(model, SIZE, checkpoint_blocks=2).compute(CASES, chunk_size)) <= reference.bound
