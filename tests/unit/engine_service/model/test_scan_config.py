"""Configs of Nemotron-H: what each layer is, by every name that releases have for it, bounds of steps, and what is refused."""

import math
from typing import Any

import pytest

from kvkeeper.engine_service.model.checkpoint.errors import ModelConfigError, ModelError, UnsupportedModelError
from kvkeeper.engine_service.model.config import ModelConfig, parse_model_config
from kvkeeper.engine_service.model.layer_groups import group_states
from kvkeeper.engine_service.model.recurrent.recurrent_config import state_bytes
from kvkeeper.engine_service.model.recurrent.scan_config import ScanShape

NANO: dict[str, Any] = {  # in what matters here as Nemotron 3 Nano is released
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "rope_theta": 10000,
    "layer_norm_epsilon": 1e-5,
    "time_step_min": 0.001,
    "time_step_limit": [0.0, math.inf],
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "mlp_hidden_act": "relu2",
}


def shape_of(config: ModelConfig) -> ScanShape:
    assert config.recurrent is not None
    assert isinstance(config.recurrent.shape, ScanShape)
    return config.recurrent.shape


def test_a_pattern_says_what_each_layer_is() -> None:
    config = parse_model_config(NANO)
    assert config.recurrent is not None
    assert config.experts is not None
    assert (config.num_layers, config.head_dim, config.unrotated) == (52, 128, frozenset(range(52)))
    assert config.attending == (5, 12, 19, 26, 33, 42)
    assert [len(each) for each in (config.recurrent.layers, config.experts.layers)] == [23, 23]
    assert (config.experts.shared_size, config.experts.routing.scale, config.experts.latent_size) == (3712, 2.5, 0)
    assert [config.has_mlp(layer) for layer in range(6)] == [False, True, False, True, False, False]
    assert config.reads[:8] == (0, 0, 1, 0, 2, 3, 0, 4), "layers that store nothing have no number"
    # A block of 348 tokens is the smallest that a state fits in, and of 1,042 the smallest for three of them.
    size = state_bytes(shape_of(config).state, 2)
    numbers = {config.reads[layer] for layer in config.recurrent.layers}
    for block_size, num_groups in ((348, 24), (1042, 9)):
        groups = group_states(numbers, len(config.mixing), size, 2 * 2 * 128 * 2, block_size, 1)
        assert len(groups) == num_groups
        assert groups[0].layers == tuple(config.reads[layer] for layer in config.attending)
    with pytest.raises(UnsupportedModelError, match=r"348 or more"):
        group_states(numbers, len(config.mixing), size, 2 * 2 * 128 * 2, 347, 1)


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_lists_and_older_names_say_the_same(key: str) -> None:
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    listed = [names[each] for each in NANO["hybrid_override_pattern"]]
    others = {"mamba_n_groups": 8, "mamba_d_conv": 4, "mamba_dt_limit": [0.0, math.inf], "mamba_conv_bias": True}
    plain = {name: value for name, value in NANO.items() if name not in ("hybrid_override_pattern", "time_step_limit")}
    assert parse_model_config(plain | others | {key: listed}) == parse_model_config(NANO)


def test_steps_are_bounded_by_their_limit_and_not_by_what_weights_were_drawn_with() -> None:
    for said, bounds in ((None, (0.0, math.inf)), ([0, 0.1], (0.0, 0.1)), ([0.001, math.inf], (0.001, math.inf))):
        shape = shape_of(parse_model_config(NANO | {"time_step_limit": said}))
        assert (shape.least, shape.most) == bounds


def test_dense_models_have_no_experts() -> None:
    assert parse_model_config(NANO | {"hybrid_override_pattern": "M-M*-"}).experts is None


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"hybrid_override_pattern": None}, ModelConfigError, "hybrid_override_pattern must name"),
        ({"hybrid_override_pattern": "MX*"}, UnsupportedModelError, "layer type 'X'"),
        ({"layers_block_type": ["mamba", 3]}, ModelConfigError, "layers_block_type must name"),
        ({"hybrid_override_pattern": "M-M-"}, UnsupportedModelError, "models with layers of attention and recurrent ones"),
        ({"hybrid_override_pattern": "*-*-"}, UnsupportedModelError, "models with layers of attention and recurrent ones"),
        ({"time_step_limit": [0.1]}, ModelConfigError, "time_step_limit must be two numbers"),
        ({"time_step_limit": [True, 1.0]}, ModelConfigError, "time_step_limit must be two numbers"),
        ({"time_step_limit": [0.2, 0.1]}, ModelConfigError, "time_step_limit must be 0 or more"),
        ({"n_groups": 7}, ModelConfigError, "n_groups 7 does not divide"),
        ({"conv_kernel": 1}, ModelConfigError, "conv_kernel must be 2 or more"),
        ({"mamba_hidden_act": "relu"}, UnsupportedModelError, "mamba_hidden_act"),
        ({"mlp_hidden_act": "silu"}, UnsupportedModelError, "mlp_hidden_act"),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], kind: type[ModelError], message: str) -> None:
    with pytest.raises(kind, match=message):
        parse_model_config(NANO | changes)
