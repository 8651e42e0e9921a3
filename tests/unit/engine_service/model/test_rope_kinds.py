"""Every kind of rotary embedding in every native family gives the logits of transformers; a part of a head, too, in Phi-3."""

from typing import Any

import pytest
import torch

from kvkeeper.engine_service.model.families.table import FAMILIES
from kvkeeper.engine_service.model.loader import load_model
from tests.support.models.tiny_models import TINY_MODELS, NumericsCase, TinyModel, build_model_folder, logits_of, random_tokens
from tests.unit.engine_service.model.test_numerics import HandTables

torch.set_num_threads(1)
NUM_TOKENS = 40
# Without config.json's own: the library writes theta and kind into it.
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "truncate": False},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 64},
    "proportional": {"factor": 1.5},
}
_TYPES = {model.family: model for model in reversed(TINY_MODELS)}  # the first of each family
FIRST = {  # by model type, of which the library's classes have other names
    "bailing_hybrid": "BailingHybrid",
    "gemma3_text": "Gemma3Text",
    "gemma4_text": "Gemma4Text",
    "gemma4_unified_text": "Gemma4UnifiedText",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "gpt_oss": "GptOss",
    "lfm2_moe": "Lfm2Moe",
    "llama4_text": "Llama4Text",
    "minicpm3": "MiniCPM3",
    "qwen3_5_moe_text": "Qwen3_5MoeText",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
}
WITH_DELTA = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
PHI3 = ("default", "longrope")  # the library's own check refuses it the others
ROTATED = [name for name, family in FAMILIES.items() if family.has_rope]
CASES = [(family, kind, 1.0) for family in ROTATED for kind in (PHI3 if family == "phi3" else KINDS)]
CASES = [
    case for case in CASES if case[:2] not in (("gemma4_text", "longrope"), ("gemma4_unified_text", "longrope"))
]  # likewise
CASES += [("phi3", kind, 0.75) for kind in PHI3]
CASES += [(family, "proportional", part) for family in ("gemma4_text", "llama") for part in (0.25, 0.3)]


@pytest.mark.parametrize(("model_type", "kind", "part"), CASES)
@pytest.mark.filterwarnings("ignore")  # of the library, about lengths
def test_a_kind_of_rope_is_that_of_transformers(model_type, kind, part, tmp_path):
    kind_of_model = _TYPES[FIRST.get(model_type, model_type.capitalize())]
    changes = dict(kind_of_model.overrides) | {"num_hidden_layers": 1}
    width = int(part * changes.get("qk_rope_head_dim", 16))
    rope = {"rope_type": kind, "rope_theta": 10000.0} | KINDS[kind]
    if part < 1 or model_type in WITH_DELTA:  # whose configs have a quarter unless they name a part
        rope["partial_rotary_factor"] = part
    if model_type in (*WITH_DELTA, "bailing_hybrid", "lfm2", "lfm2_moe"):
        changes["layer_types"] = ["full_attention"]
    if kind == "longrope":
        rope |= {"short_factor": [1.0 + at / 4 for at in range(width // 2)], "long_factor": [9.0] * (width // 2)}
    if model_type in ("gemma3_text", "gemma4_text", "gemma4_unified_text"):
        changes |= {"layer_types": ["full_attention"], "num_kv_shared_layers": 0}
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    if model_type == "phi3" and kind == "longrope":
        changes["original_max_position_embeddings"] = 64
    if model_type.startswith("qwen3_5"):
        rope["mrope_section"] = [3, 3, 2]
    model = TinyModel(kind_of_model.name, kind_of_model.family, changes | {"rope_parameters": rope})
    folder = build_model_folder(tmp_path, model)
    case = NumericsCase(random_tokens(NUM_TOKENS))
    (expected,) = logits_of(folder, [case])
    decoder, config = load_model(folder, progress=False)
    assert config.rope.kind == ("default" if kind == "dynamic" else kind)
    (found,) = HandTables(decoder, 16).compute([case], 16)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
