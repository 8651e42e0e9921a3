"""Combinations of a model and a setting that are refused when the model is loaded, each with a sentence."""

import dataclasses
from pathlib import Path

import pytest

from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from tests.support.models.tiny_models import build_model_folder, tiny_model


def folder_of(name: str, folder: Path) -> Path:
    return build_model_folder(folder, tiny_model(name))


def test_few_bits_are_refused_to_models_whose_attention_reads_none(tmp_path: Path) -> None:
    folder = str(folder_of("deepseek_v3", tmp_path))
    assert load_served_model(EngineConfig(model=folder, progress=False)).num_parameters > 0
    with pytest.raises(UnsupportedModelError, match=r"--kv-dtype.*int8.*auto for models with latent attention"):
        load_served_model(EngineConfig(model=folder, progress=False, kv_dtype="int8"))


def test_what_is_not_built_of_recurrent_families_is_named(tmp_path: Path) -> None:
    kind = tiny_model("qwen3_5_0_8b")
    folder = build_model_folder(tmp_path, dataclasses.replace(kind, overrides=kind.overrides | {"hidden_act": "gelu"}))
    with pytest.raises(UnsupportedModelError, match="hidden_act 'gelu' is not supported; supported: silu"):
        load_served_model(EngineConfig(model=str(folder), progress=False))
