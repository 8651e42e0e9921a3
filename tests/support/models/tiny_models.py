"""Tiny random models in Hugging Face folders, and the reference logits that an engine is held to.

A case is built with weights at 0.1, where a lost token shows, and read by transformers twice: eager attention is the
reference, and its distance from SDPA in the same run says how much of a difference means nothing.
"""

import contextlib
import json
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB_SIZE = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_OSS_ROPE = _YARN_ROPE | {"truncate": False, "beta_fast": 8.0}
_MSCALE_ROPE = _YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.2}
_LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0], "long_factor": [9.0] * 6}
_MULTIPLIERS = {
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.8,
    "logits_scaling": 0.7,
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "attention_chunk_size": 16,
    "floor_scale": 6,
    "attn_scale": 0.7,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size_mlp": 96,
    "intermediate_size": 48,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "use_sliding_window": False}

_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}

# Groups of one recurrent layer fit blocks of four tokens of one layer of attention. The norm of what a head gives divides by
# its length, which is nearly nothing where a query and a key are at right angles: a larger eps keeps rounding small there.
_DELTA = {
    "rms_norm_eps": 0.01,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
# Released shapes of Nemotron-H, scaled down: the first layers of each pattern, and its kinds. Many steps meet their bound.
# It has two names, because the library takes the first and released kernels the second.
_NEMOTRON = {
    "layer_norm_epsilon": 0.01,
    "num_attention_heads": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 2,
    "n_groups": 2,
    "ssm_state_size": 4,
    "time_step_min": 0.5,
    "time_step_limit": [0.5, math.inf],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
# The released Gemma 4, each scaled down by its own ratios: heads of full layers are twice as large, and fewer;
# the patterns of kinds, sharing, and what a form has besides are kept.
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4 = {
    "rms_norm_eps": 0.01,
    "sliding_window": 8,
    "head_dim": 8,
    "global_head_dim": 16,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_E2B = _GEMMA4 | {
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
    "num_kv_shared_layers": 3,
    "num_key_value_heads": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
}
_GEMMA4_31B = _GEMMA4 | {
    "num_hidden_layers": 7,
    "layer_types": [*[_SLIDING] * 5, _FULL, _FULL],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}


# Released shapes of Qwen3.5, scaled down: as many heads of queries for one of keys, and of values for one of keys, and the same
# pattern of layers. Each state fits blocks of four tokens.
_QWEN3_5 = {
    "rms_norm_eps": 0.01,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
}
_QWEN3_5_MOE = _QWEN3_5 | {
    "num_attention_heads": 16,
    "linear_num_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}


# Released shapes of Kimi Linear and Ling 3, scaled down: heads as many and as long as their ratios say, and their patterns of
# layers, of which the first ones have an MLP. Each state fits blocks of four tokens of two layers of latents.
_KIMI_LINEAR = {
    "rms_norm_eps": 0.01,
    "pad_token_id": 0,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_local_experts": 8,
}
_LING_3 = _KIMI_LINEAR | {
    "num_hidden_layers": 6,
    "layer_group_size": 3,
    "head_dim": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 2,
    "short_conv_kernel_size": 3,
    "num_mtp_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A family and what differs from the common tiny config."""

    name: str
    family: str
    overrides: dict[str, Any] = field(default_factory=dict)


TINY_MODELS = (
    TinyModel("llama", "Llama"),
    TinyModel("llama_tied", "Llama", {"tie_word_embeddings": True}),
    TinyModel("llama_llama3_rope", "Llama", {"rope_parameters": _LLAMA3_ROPE}),
    TinyModel(
        "llama_biased_linear_rope",
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LINEAR_ROPE},
    ),
    TinyModel("llama_dynamic_rope", "Llama", {"rope_parameters": _DYNAMIC_ROPE}),
    TinyModel("mistral", "Mistral", {"sliding_window": None}),
    TinyModel("mistral_window", "Mistral", {"sliding_window": 8}),
    TinyModel("qwen2", "Qwen2"),
    TinyModel("qwen2_yarn_rope", "Qwen2", {"rope_parameters": _YARN_ROPE}),
    TinyModel(
        "qwen2_window",
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    TinyModel("qwen3", "Qwen3"),
    TinyModel("qwen3_tied", "Qwen3", {"tie_word_embeddings": True}),
    TinyModel("lfm2", "Lfm2", _CONV | {"block_multiple_of": 16}),
    TinyModel(
        "lfm2_biased_untied",
        "Lfm2",
        _CONV | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    TinyModel(
        "lfm2_moe",
        "Lfm2Moe",
        _CONV | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_dense_layers": 1},
    ),
    TinyModel("nemotron_3_nano", "NemotronH", _NEMOTRON | {"hybrid_override_pattern": "MEMEM*E"}),
    TinyModel(
        "nemotron_3_super",
        "NemotronH",
        _NEMOTRON | {"hybrid_override_pattern": "MEMEM*EM", "moe_latent_size": 16, "n_group": 4, "topk_group": 2},
    ),
    TinyModel(
        "nemotron_h_biased",
        "NemotronH",
        _NEMOTRON | {"hybrid_override_pattern": "M-*-M-", "mlp_bias": True, "use_bias": True},
    ),
    TinyModel("qwen3_next", "Qwen3Next", _DELTA),
    TinyModel(
        "qwen3_next_biased_one_dense",
        "Qwen3Next",
        _DELTA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "attention_bias": True,
            "linear_num_key_heads": 2,
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "rope_parameters": _PARTIAL_ROPE,
        },
    ),
    TinyModel(
        "qwen3_5_0_8b",
        "Qwen3_5Text",
        _QWEN3_5 | {"num_attention_heads": 8, "linear_num_value_heads": 2, "tie_word_embeddings": True},
    ),
    TinyModel(
        "qwen3_5_27b",
        "Qwen3_5Text",
        _QWEN3_5 | {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 6},
    ),
    TinyModel("qwen3_5_35b_a3b", "Qwen3_5MoeText", _QWEN3_5_MOE),
    TinyModel(
        "kimi_linear",
        "KimiLinear",
        _KIMI_LINEAR
        | {
            "num_hidden_layers": 7,
            "linear_attn_config": {
                "full_attn_layers": [4, 7],
                "kda_layers": [1, 2, 3, 5, 6],
                "head_dim": 4,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    TinyModel("ling_3", "BailingHybrid", _LING_3),
    TinyModel("ling_3_unbounded", "BailingHybrid", _LING_3 | {"kda_safe_gate": False}),
    TinyModel("mixtral", "Mixtral", {"num_local_experts": 4}),
    TinyModel("mixtral_window", "Mixtral", {"num_local_experts": 4, "sliding_window": 8}),
    TinyModel("qwen3_moe", "Qwen3Moe", _EXPERTS),
    TinyModel("qwen3_moe_renormalised_one_dense", "Qwen3Moe", _EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    TinyModel(
        "gpt_oss",
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 8, "rope_parameters": _OSS_ROPE},
    ),
    TinyModel("llama4", "Llama4Text", _LLAMA4),
    TinyModel(
        "llama4_dense_between_biased",
        "Llama4Text",
        _LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True, "no_rope_layers": [0, 1, 1, 1]},
    ),
    TinyModel("deepseek_v2", "DeepseekV2", _LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1}),
    TinyModel(
        "deepseek_v2_groups",
        "DeepseekV2",
        _LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7, "rope_parameters": _MSCALE_ROPE},
    ),
    TinyModel("deepseek_v3", "DeepseekV3", _LATENT | {"first_k_dense_replace": 1, "rope_parameters": _MSCALE_ROPE}),
    TinyModel(
        "deepseek_v3_biased_halves",
        "DeepseekV3",
        _LATENT
        | {
            "attention_bias": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
        },
    ),
    TinyModel("glm4_moe_lite", "Glm4MoeLite", _LATENT),
    TinyModel("minicpm3", "MiniCPM3", _LATENT | {"dim_model_base": 32, "scale_emb": 3, "scale_depth": 1.1}),
    TinyModel("youtu", "Youtu", _LATENT | {"tie_word_embeddings": False}),
    TinyModel("olmo2", "Olmo2"),
    TinyModel("olmo2_biased", "Olmo2", {"attention_bias": True}),
    TinyModel("granite", "Granite", _MULTIPLIERS),
    TinyModel("granite_biased", "Granite", {"attention_bias": True, "mlp_bias": True}),
    TinyModel("phi3", "Phi3", {"pad_token_id": 0}),
    TinyModel("phi3_window_partial", "Phi3", {"pad_token_id": 0, "sliding_window": 8, "rope_parameters": _PARTIAL_ROPE}),
    TinyModel(
        "phi3_longrope_partial",
        "Phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 128,
            "rope_parameters": _PARTIAL_ROPE | _LONGROPE,
        },
    ),
    TinyModel("gemma", "Gemma"),
    TinyModel("gemma2", "Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}),
    TinyModel("gemma3", "Gemma3Text", {"sliding_window": 8, "sliding_window_pattern": 2}),
    TinyModel("gemma4_e2b", "Gemma4Text", _GEMMA4_E2B),
    TinyModel("gemma4_e4b", "Gemma4Text", _GEMMA4_E2B | {"num_key_value_heads": 2, "use_double_wide_mlp": False}),
    TinyModel("gemma4_12b", "Gemma4UnifiedText", _GEMMA4_31B | {"num_hidden_layers": 6, "layer_types": None}),
    TinyModel(
        "gemma4_26b",
        "Gemma4Text",
        _GEMMA4_31B
        | {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
        },
    ),
    TinyModel("gemma4_31b", "Gemma4Text", _GEMMA4_31B),
)


_WITH_DELTA = ("qwen3next", "qwen35")


def tiny_model(name: str) -> TinyModel:
    """The one of TINY_MODELS that has this name."""
    return next(model for model in TINY_MODELS if model.name == name)


def build_model_folder(folder: Path, model: TinyModel, *, seed: int = 0, max_shard_size: str = "1GB") -> Path:
    """Write config.json and safetensors of a random model; random biases and norms too, so that losing one shows."""
    config = getattr(transformers, f"{model.family}Config")(**{**_COMMON, **model.overrides})
    torch.manual_seed(seed)
    with quiet_transformers():
        network = getattr(transformers, f"{model.family.removesuffix('Text')}ForCausalLM")(config)
        randomise(network, model.family)
        network.save_pretrained(folder, max_shard_size=max_shard_size)
    if model.family == "KimiLinear":
        _name_as_released(folder)
    return folder


def _name_as_released(folder: Path) -> None:
    """Only what has experts is called so in released files of Kimi Linear; the library writes MLPs by the same name."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        is_mlp = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj\.)")
        save_file({is_mlp.sub("mlp.", name): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})


def randomise(network: Any, family: str) -> None:
    """Draw biases and norms too. family: the name or the type of the text model, which says whether norms are 1 + weight."""
    has_offset = family.lower().replace("_", "").startswith(_WITH_DELTA)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("scale"):  # of a router's input, and of each expert
                parameter.normal_(1, 0.2)
            elif family.startswith("Bailing") and name.endswith("dt_bias"):
                parameter.normal_(-3, 1)  # at 0 half of the bound is forgotten with each token, so that no state shows
            elif family.startswith("Bailing") and name.endswith("A_log"):
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.1)
            elif name.endswith("q_norm.weight") and family.lower().startswith("gemma4"):  # the factor of its scores is in it
                parameter.normal_(0.15, 0.03)
            elif name.endswith(".D"):
                parameter.normal_(1, 0.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-4, 0)  # the library's own are forgotten within a token or two, so that no state shows
            elif "norm" in name:
                is_factor = name.endswith("linear_attn.norm.weight") or not has_offset
                parameter.normal_(1 if is_factor else 0, 0.1)  # else of 1 + weight
        for name, buffer in network.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.1)
            elif name.endswith("layer_scalar"):
                buffer.normal_(0.8, 0.1)


def write_v4_config(folder: Path) -> None:
    """Rewrite config.json in the style of transformers 4: rope_theta and rope_scaling, torch_dtype."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}  # Nemotron-H has none
    if "full_attention" in rope:  # Gemma 3: windows have a rope of their own, and come in turn
        raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        raw["sliding_window_pattern"] = raw["layer_types"].index("full_attention") + 1
        rope = rope["full_attention"]
    raw["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    raw["torch_dtype"] = raw.pop("dtype")
    if {"conv", "linear_attention"}.isdisjoint(raw.get("layer_types", ())):  # those were named so from the first release on
        raw.pop("layer_types", None)
    path.write_text(json.dumps(raw))


def choose_all_experts(folder: Path) -> None:
    """Have a model's tokens go through all of its experts, if it has any.

    For computation that rounds more: where two experts come out nearly the same, it may choose the other one, and all is other.
    """
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    if num_experts := next((raw[key] for key in keys if raw.get(key) is not None), 0):
        num_groups = raw.get("n_group") or raw.get("num_expert_group")
        groups = {"topk_group": num_groups} if num_groups else {}
        chosen = next((key for key in ("top_k_experts", "num_experts_per_token") if key in raw), "num_experts_per_tok")
        path.write_text(json.dumps(raw | {chosen: num_experts} | groups))


@dataclass(frozen=True, slots=True)
class NumericsCase:
    """A sequence to compute, and how its K and V come to be.

    Attributes:
        tokens: the whole sequence; every token's logits are compared.
        hit_len: leading tokens, whole blocks, in the blocks of `parent` (0: none).
        fork_len: leading tokens shared with `parent` by a fork; a partial last block is copied on write (0: none).
        parent: index of an earlier case, computed before this one.
        preempt_at: after this many tokens the sequence loses its blocks and starts again in others (None: never).
    """

    tokens: tuple[int, ...]
    hit_len: int = 0
    fork_len: int = 0
    parent: int = 0
    preempt_at: int | None = None


def numerics_cases(block_size: int) -> tuple[NumericsCase, ...]:
    """Prompts of k*B - 1, k*B and k*B + 1 tokens, prefix hits, forks with and without a partial tail, preemptions."""
    lengths = [n for k in (1, 2, 3) for n in (k * block_size - 1, k * block_size, k * block_size + 1)]
    cases = [NumericsCase(random_tokens(n, seed=n)) for n in lengths]
    parent, whole = len(cases) - 1, cases[-1].tokens  # of 3 * B + 1 tokens

    def continued(shared: int, num_own: int) -> tuple[int, ...]:
        return (*whole[:shared], *random_tokens(num_own, seed=1000 + shared + num_own))

    for num_blocks, num_own in ((1, 1), (2, block_size), (3, block_size + 1)):
        shared = num_blocks * block_size
        cases.append(NumericsCase(continued(shared, num_own), hit_len=shared, parent=parent))
    for shared, num_own in ((block_size, 1), (block_size + 1, 2), (3 * block_size - 1, 2 * block_size)):
        cases.append(NumericsCase(continued(shared, num_own), fork_len=shared, parent=parent))
    for at in (block_size - 1, block_size, 2 * block_size + 1):
        cases.append(NumericsCase(random_tokens(3 * block_size, seed=2000 + at), preempt_at=at))
    return tuple(cases)


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Teacher-forced logits of transformers, float32.

    Attributes:
        eager: [T, vocab_size] of each case.
        noise: largest difference between eager and SDPA attention over all cases.
    """

    eager: tuple[torch.Tensor, ...]
    noise: float

    @property
    def bound(self) -> float:
        """The largest error that an engine may have: 1e-5, and 5 times what transformers itself differs by."""
        return min(1e-5, 5 * self.noise)

    def error(self, found: Sequence[torch.Tensor]) -> float:
        """Largest absolute error of logits found for the cases, in their order; NaN anywhere gives NaN."""
        assert [f.shape for f in found] == [e.shape for e in self.eager]
        errors = torch.stack([(f - e).abs().max() for f, e in zip(found, self.eager, strict=True)])
        return float(errors.max())


def reference_logits(folder: Path, cases: Sequence[NumericsCase]) -> ReferenceLogits:
    """Run every case whole, without a cache, through transformers with eager and, where it has it, with SDPA attention."""
    eager = logits_of(folder, cases)
    if not has_sdpa(folder):
        return ReferenceLogits(eager, math.inf)
    sdpa = logits_of(folder, cases, attention="sdpa")
    return ReferenceLogits(eager, max(float((a - b).abs().max()) for a, b in zip(eager, sdpa, strict=True)))


def has_sdpa(folder: Path) -> bool:
    """Whether transformers computes the model with SDPA too: not with capped scores, nor with keys that have no value."""
    raw = json.loads((folder / "config.json").read_text())
    return raw.get("attn_logit_softcapping") is None and raw["model_type"] != "gpt_oss"


def random_tokens(num_tokens: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> tuple[int, ...]:
    """Token ids in [3, vocab_size)."""
    return tuple(torch.randint(3, vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist())


def logits_of(
    folder: Path, cases: Sequence[NumericsCase], dtype: torch.dtype = torch.float32, attention: str = "eager"
) -> tuple[torch.Tensor, ...]:
    """Logits of transformers [T, vocab_size] of each case, float32, computed in dtype."""
    with quiet_transformers():
        network = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype).eval()
    with torch.no_grad():
        return tuple(network(torch.tensor([case.tokens]), use_cache=False).logits[0].float() for case in cases)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """It logs and warns about what tests do on purpose."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers.logging.set_verbosity(before)
