"""Models with recurrent layers as they are served: the spec that they ask for, and each setting that they are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.rpc.convert.kv_spec import kv_spec
from kvkeeper.engine_service.cache_session.kv_spec import make_kv_spec
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from tests.benchmarks import kv_errors
from tests.support.models.tiny_models import build_model_folder, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), tiny_model("qwen3_next"))


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), progress=False, **{"block_size": 4, "checkpoint_tokens": 8, **options})


@pytest.mark.parametrize(("block_size", "sizes"), [(4, [1, 1, 1]), (5, [2, 1]), (16, [3])])
def test_the_spec_tells_what_a_state_takes(folder: Path, block_size: int, sizes: list[int]) -> None:
    served = load_served_model(config_of(folder, block_size=block_size))
    spec = make_kv_spec(served, block_size)
    first, *others = spec.groups
    assert (first.kind, list(first.layer_idx), first.state_bytes) == (pb.LAYER_GROUP_KIND_FULL, [3], 0)
    assert {group.kind for group in others} == {pb.LAYER_GROUP_KIND_RECURRENT}
    assert [len(group.layer_idx) for group in others] == sizes
    # Two matrices of 4 x 8 in float32, and three inputs of 24 numbers.
    assert [group.state_bytes for group in others] == [size * (2 * 4 * 8 * 4 + 3 * 24 * 4) for size in sizes]
    assert {group.checkpoint_blocks for group in others} == {max(8 // block_size, 1)}
    assert spec.num_layers == 4
    assert served.layout(block_size).block_bytes == 2 * block_size * 2 * 16 * 4
    assert served.refuses_retention == "a model with recurrent layers"


def test_latents_beside_states_are_pages_of_their_group(tmp_path: Path) -> None:
    served = load_served_model(config_of(build_model_folder(tmp_path, tiny_model("kimi_linear"))))
    spec = make_kv_spec(served, 4)
    first, *others = spec.groups
    assert (spec.layout, spec.num_layers, spec.num_kv_heads, spec.head_dim) == (pb.KV_LAYOUT_GROUPED, 7, 0, 0)
    assert (first.kind, list(first.layer_idx)) == (pb.LAYER_GROUP_KIND_FULL, [3, 6])
    # Two layers of four tokens, each with a latent of 32 numbers and a key of 4.
    assert first.page.page_bytes == served.layout(4).block_bytes == 2 * 4 * (32 + 4) * 4
    assert [list(group.layer_idx) for group in others] == [[0], [1], [2], [4], [5]]
    # Four matrices of 4 x 4 in float32, and three inputs of 48 numbers.
    assert {group.state_bytes for group in others} == {4 * 4 * 4 * 4 + 3 * 48 * 4}
    assert not any(group.HasField("page") for group in others)
    kv_spec(spec)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculation": "prompt-look-up"}, "--speculation 'prompt-look-up' .* a guess that is not kept has changed the state"),
        ({"speculation": "draft-model", "draft_model": "x"}, "--speculation 'draft-model' .* models without recurrent layers"),
        ({"role": "prefill"}, "--role 'prefill' .* a running state stays with its engine"),
        ({"role": "decode", "prefill": "localhost:1"}, "--role 'decode' .* models without recurrent layers"),
        ({"kv_dtype": "int8"}, "--kv-dtype 'int8' .* a state is not rounded"),
        ({"groups": False}, "--no-groups .* a state has a block table of its own"),
        ({"block_size": 2}, "--block-size 2 .* 3 or more: a block holds a state of 1 layers"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_a_state_cannot_do_is_refused_at_load(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        load_served_model(config_of(folder, **options))


def test_its_quality_is_not_measured(folder: Path) -> None:
    found = kv_errors.measure(folder, [], [np.arange(4)], [], [4])
    with pytest.raises(UnsupportedModelError, match=r"the quality of model type 'qwen3_next' .* without recurrent layers"):
        next(found)
