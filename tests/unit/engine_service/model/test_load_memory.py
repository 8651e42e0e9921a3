"""What a load takes of memory: the packed model and a layer, as the check before a start says, and never a dense model."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.decoder import LayerWeights
from kvkeeper.engine_service.model.dtype_name import DtypeChoice
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.loading import filling
from kvkeeper.engine_service.preflight import check_model
from kvkeeper.kernels.cpu import compiled
from tests.support.models.tiny_models import build_model_folder, tiny_model

NUM_LAYERS, HIDDEN, INNER = 16, 512, 1408
LARGE = dataclasses.replace(
    tiny_model("llama"),
    overrides={"num_hidden_layers": NUM_LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 8,
               "num_key_value_heads": 8, "head_dim": 64},
)  # fmt: skip
OTHER_BYTES = 8 << 20  # of torch, and of a matrix's integers while they are laid out


@pytest.fixture
def kernels() -> Iterator[None]:
    pytest.importorskip("numba")
    compiled.switch(on=True)
    yield
    compiled.switch(on=False)


def own_bytes() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.parametrize("dtype", ["int4", "int8", "float32"])
@pytest.mark.usefixtures("kernels")
def test_a_load_takes_what_the_check_before_it_says(
    dtype: DtypeChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_model_folder(tmp_path, LARGE)
    found: list[int] = []

    class Watched(filling.Packing):
        def finish_layer(self, layer: LayerWeights) -> LayerWeights:
            found.append(own_bytes())
            made = super().finish_layer(layer)
            found.append(own_bytes())
            return made

    monkeypatch.setattr("kvkeeper.engine_service.model.loader.Packing", Watched)
    load_model(folder, dtype="int4", progress=False)  # what is taken once: kernels, and what allocators keep
    found.clear()
    said = check_model(folder, EngineConfig(model=str(folder), dtype=dtype))
    before = own_bytes()
    model, _ = load_model(folder, dtype=dtype, progress=False)
    assert len(found) == 2 * NUM_LAYERS
    assert max(found) - before < said.weights + said.beside + OTHER_BYTES
    dense = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values()) * 4
    assert said.weights + said.beside + OTHER_BYTES < (0.45 if dtype != "float32" else 1.2) * dense
    assert model.config.num_layers == NUM_LAYERS


def test_a_file_whose_layers_lie_in_any_order_is_read(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "plain", tiny_model("llama"))
    tensors = load_file(folder / "model.safetensors")
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "config.json").write_bytes((folder / "config.json").read_bytes())
    places = {}
    for place, name in enumerate(
        sorted(tensors, key=lambda name: name.split(".")[-2])
    ):  # the same parts of all layers together
        file = f"model-{place:03}.safetensors"
        save_file({name: tensors[name]}, apart / file)
        places[name] = file
    (apart / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    models = [load_model(each, progress=False)[0] for each in (folder, apart)]
    for one, other in zip(*(model._layers for model in models), strict=True):
        assert torch.equal(one.qkv.data.to_dense(), other.qkv.data.to_dense())
