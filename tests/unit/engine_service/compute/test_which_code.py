"""Which code computes a model is told when it is loaded, and the check before torch is imported decides the same."""

from pathlib import Path

import pytest
import structlog
import torch

from kvkeeper.engine_service import preflight
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from tests.support.models.tiny_models import TINY_MODELS, TinyModel, build_model_folder, tiny_model

torch.set_num_threads(1)

LIBRARY = [
    (TinyModel("starcoder2", "Starcoder2"), "the family is not native"),
    (TinyModel("llama_relu", "Llama", {"hidden_act": "relu"}), "hidden_act 'relu' is not supported; supported: silu"),
]


def told(folder: Path, event: str = "model_through_transformers") -> list[str]:
    config = EngineConfig(model=str(folder), listen="127.0.0.1:0", progress=False)
    preflight.check_model(folder, config)
    with structlog.testing.capture_logs() as logs:
        load_served_model(config)
    return [line["reason"] for line in logs if line["event"] == event]


@pytest.mark.parametrize(("model", "reason"), LIBRARY, ids=[model.name for model, _ in LIBRARY])
def test_a_model_of_the_library_is_told_with_the_reason(model: TinyModel, reason: str, tmp_path: Path) -> None:
    assert told(build_model_folder(tmp_path, model)) == [reason]


@pytest.mark.parametrize("model", TINY_MODELS, ids=lambda model: model.name)
def test_a_native_model_is_native(model: TinyModel, tmp_path: Path) -> None:
    assert told(build_model_folder(tmp_path, model)) == []


@pytest.mark.parametrize("name", ["phi3", "phi3_longrope_partial", "qwen2_yarn_rope"])
def test_a_native_model_that_is_served_up_to_a_length_says_so(name: str, tmp_path: Path) -> None:
    reasons = told(build_model_folder(tmp_path, tiny_model(name)), "model_length_limited")
    assert len(reasons) == (name == "phi3_longrope_partial")
    assert all("longrope" in reason for reason in reasons)


def test_in_8_bits_a_model_of_the_library_is_refused_before_torch(tmp_path: Path) -> None:
    model, _ = LIBRARY[1]
    config = EngineConfig(model=str(build_model_folder(tmp_path, model)), listen="127.0.0.1:0", dtype="int8")
    with pytest.raises(UnsupportedModelError, match="'int8' is not supported; supported: the native families"):
        preflight.check_model(Path(config.model), config)
