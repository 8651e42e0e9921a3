"""Loading: every way a folder can be right, and every way it can be wrong."""

import json
import os
import struct
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.digest import weights_digest
from kvkeeper.engine_service.model.checkpoint.errors import (
    ModelConfigError,
    ModelError,
    ModelFileMissingError,
    UnsupportedModelError,
    WeightsError,
)
from kvkeeper.engine_service.model.config import RopeConfig, parse_model_config, read_model_config
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.kernels.layout import KvLayout
from tests.support.models.tiny_models import TINY_MODELS, build_model_folder, write_v4_config

torch.set_num_threads(1)

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {model.name: model for model in TINY_MODELS}


@pytest.fixture
def folder(tmp_path):
    return build_model_folder(tmp_path / "model", MODELS["llama"])


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("gemma4")])  # of which there is one style
def test_both_config_styles_mean_the_same(name, tmp_path):
    folder = build_model_folder(tmp_path, MODELS[name])
    newer = read_model_config(folder)
    write_v4_config(folder)
    assert "rope_parameters" not in (folder / "config.json").read_text()
    assert read_model_config(folder) == newer


def test_families_differ_in_data():
    found = {}
    for name in ("llama_biased_linear_rope", "mistral_window", "qwen2_window", "qwen3"):
        raw = {
            "model_type": MODELS[name].family.lower(),
            "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        }  # fmt: skip
        found[name] = parse_model_config(raw | MODELS[name].overrides)
    llama, mistral, qwen2, qwen3 = found.values()
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, "none")
    assert llama.rope == RopeConfig(10000.0, "linear", 4.0)
    assert (mistral.qkv_bias, mistral.windows) == (False, (8, 8))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.windows) == (True, False, (None, 8))
    assert (qwen3.qk_norm, qwen3.head_dim, qwen3.windows) == ("head", 128, (None, None))


def test_shards_load_like_one_file(folder, tmp_path):
    sharded = build_model_folder(tmp_path / "sharded", MODELS["llama"], max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = load_model(folder, progress=False)[0], load_model(sharded, progress=False)[0]
    assert torch.equal(one._embed, many._embed)
    assert torch.equal(one._layers[1].qkv.data.to_dense(), many._layers[1].qkv.data.to_dense())


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_of_computation(folder, stored):
    change_weights(folder, lambda tensors: tensors.update({k: t.to(stored) for k, t in tensors.items()}))
    assert load_model(folder, progress=False)[0].dtype is torch.float32
    assert load_model(folder, dtype="bfloat16", progress=False)[0].dtype is torch.bfloat16
    assert load_model(folder, dtype="float16", progress=False)[0].dtype is torch.float16
    with pytest.raises(UnsupportedModelError, match="float64"):
        load_model(folder, dtype="float64", progress=False)


def test_progress_goes_to_stderr_and_can_be_turned_off(folder, capsys):
    load_model(folder)
    shown = capsys.readouterr()
    assert "loading" in shown.err
    assert not shown.out
    load_model(folder, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("progress", "terminal", "shown"), [(True, True, True), (True, False, False), (False, True, False)])
def test_the_engine_shows_progress_on_a_terminal_only(folder, capsys, monkeypatch, progress, terminal, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    load_served_model(EngineConfig(model=str(folder), progress=progress))
    assert ("loading" in capsys.readouterr().err) == shown


def test_nothing_is_unpickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="unpickled"):
        load_model(folder, progress=False)


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(ModelFileMissingError, match="nowhere"):
        load_model(tmp_path / "nowhere", progress=False)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ModelFileMissingError, match=r"model\.safetensors"):
        load_model(folder, progress=False)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileMissingError, match=r"config\.json"):
        load_model(folder, progress=False)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"model_type": "gpt2"}, UnsupportedModelError, "gpt2"),
        ({"model_type": None, "architectures": ["Odd"]}, UnsupportedModelError, "Odd"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "gelu"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantization_config"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, UnsupportedModelError, "axial"),
        ({"rope_parameters": None, "rope_scaling": {"type": "axial"}}, UnsupportedModelError, "axial"),
        ({"rope_parameters": LONGROPE | {"short_factor": None}}, ModelConfigError, "short_factor"),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0] * 7}}, ModelConfigError, "must have 8 numbers, has 7"),
        ({"rope_parameters": LONGROPE | {"short_factor": [0] * 8}}, ModelConfigError, "short_factor"),
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": None}}, ModelConfigError, "original_max"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.2}, ModelConfigError, "gives 3 of 16"),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, ModelConfigError, "at most 1"),
        ({"model_type": "phi3", "partial_rotary_factor": "0.5"}, ModelConfigError, "partial_rotary_factor"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.5, **DYNAMIC}, UnsupportedModelError, "partial_rotary_factor"),
        ({"model_type": "mixtral"}, ModelConfigError, "num_local_experts"),
        ({"model_type": "mixtral", **EXPERTS, "num_experts_per_tok": 5}, ModelConfigError, "5 is more than num_local_exp"),
        ({"model_type": "qwen3_moe", **EXPERTS}, ModelConfigError, "moe_intermediate_size"),
        ({"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": 1}, ModelConfigError, "mlp_only_layers"),
        ({"model_type": "granite", "residual_multiplier": "1"}, ModelConfigError, "residual_multiplier"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, ModelConfigError, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": 1}}, ModelConfigError, "truncate"),
        ({"rope_parameters": {"rope_type": "linear"}}, ModelConfigError, "factor"),
        ({"rope_parameters": []}, ModelConfigError, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
        ({"hidden_size": None}, ModelConfigError, "hidden_size"),
        ({"num_hidden_layers": 0}, ModelConfigError, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, ModelConfigError, "num_hidden_layers"),
        ({"vocab_size": True}, ModelConfigError, "vocab_size"),
        ({"vocab_size": 2**40}, ModelConfigError, r"vocab_size must be a positive integer below 2\*\*31, is 1099511627776"),
        ({"num_key_value_heads": 3}, ModelConfigError, "num_key_value_heads"),
        ({"head_dim": 5}, ModelConfigError, "head_dim"),
        ({"rms_norm_eps": -1}, ModelConfigError, "rms_norm_eps"),
        ({"attention_bias": "yes"}, ModelConfigError, "attention_bias"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(folder, changes, error, text):
    change_config(folder, **changes)
    with pytest.raises(error, match=text):
        load_model(folder, progress=False)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_not_a_json_object(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        load_model(folder, progress=False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: struct.pack("<Q", 1 << 62) + data[8:],
        lambda data: data[:8] + b"x" + data[9:],
    ],
)
def test_a_damaged_weight_file(folder, damage):
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WeightsError, match="damaged"):
        load_model(folder, progress=False)


def test_tensors_must_be_exactly_the_models(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))
    with pytest.raises(WeightsError, match=r"up_proj.*\(128, 63\).*\(128, 64\)"):
        load_model(folder, progress=False)
    change_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=f"missing.*{name}"):
        load_model(folder, progress=False)
    change_weights(folder, lambda tensors: tensors.update({"odd": torch.zeros(1)}))
    with pytest.raises(WeightsError, match="odd"):
        load_model(folder, progress=False)


@pytest.mark.parametrize(
    ("model", "part"), [("deepseek_v3", "eh_proj"), ("gemma4_e2b", "self_attn.k_proj"), ("llama", "o_proj")]
)
def test_a_number_of_any_length_is_no_layer_of_the_model(tmp_path, model, part):
    folder = build_model_folder(tmp_path, MODELS[model])
    name = f"model.layers.{'9' * 5000}.{part}.weight"
    change_weights(folder, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(WeightsError, match=r"is not part of the model that config\.json describes"):
        load_model(folder, progress=False)


def test_weights_in_a_dtype_that_is_not_built(folder):
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    with pytest.raises(UnsupportedModelError, match="int32"):
        load_model(folder, progress=False)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a.bin", 3])
def test_an_index_cannot_lead_out_of_the_folder(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelConfigError, match="weight_map"):
        load_model(folder, progress=False)


def test_an_index_that_names_an_absent_shard(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(ModelFileMissingError, match=r"a\.safetensors"):
        load_model(folder, progress=False)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelConfigError, match="weight_map"):
        load_model(folder, progress=False)


def test_an_arena_of_another_layout_is_refused(folder):
    model, config = load_model(folder, progress=False)
    other = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, torch.float16, 4)
    view = other.view(torch.zeros(4 * other.block_bytes, dtype=torch.uint8))
    with pytest.raises(ModelError, match="layout"):
        ModelRunner(model, view, other)
    with pytest.raises(ModelError, match="layout"):
        ModelRunner(model, view, make_kv_layout(config, torch.float32, 4))


def test_the_digest_follows_config_and_weights(folder, cache_home):
    first = weights_digest(folder)
    assert len(first) == 64
    assert weights_digest(folder) == first
    change_weights(folder, lambda tensors: tensors["model.norm.weight"].add_(1))
    second = weights_digest(folder)
    change_config(folder, rope_theta=5.0)
    assert len({first, second, weights_digest(folder)}) == 3
    assert len(json.loads((cache_home / "kvkeeper" / "weights_digests.json").read_text())) == 4


def test_the_digest_is_remembered_by_inode_size_and_time(folder, monkeypatch):
    first = weights_digest(folder)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("hashed again"))
    assert weights_digest(folder) == first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(pytest.fail.Exception, match="hashed again"):
        weights_digest(folder)


@pytest.mark.parametrize("content", [b"no json", b"[]", b'{"a": 3}'])
def test_a_damaged_memory_of_digests_is_ignored(folder, cache_home, content):
    first = weights_digest(folder)
    (cache_home / "kvkeeper" / "weights_digests.json").write_bytes(content)
    assert weights_digest(folder) == first


def test_a_cache_folder_that_cannot_be_written_is_harmless(folder, cache_home):
    cache_home.write_text("a file, where a folder is wanted")
    assert weights_digest(folder) == weights_digest(folder)
