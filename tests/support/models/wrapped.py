"""Text models inside of others, as checkpoints are released: `text_config` in config.json, prefixes of tensors, towers."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from tests.support.models.tiny_models import NumericsCase, quiet_transformers, randomise

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHERS = {"model.visual.blocks.0.norm.weight": 3, "model.visual.merger.weight": 2, "multi_modal_projector.weight": 4}
# Prefixes of the text model's tensors and of its head.
STYLES = {
    "inside": ("model.language_model.", "lm_head."),
    "around": ("language_model.model.", "language_model.lm_head."),
    "text_model": ("model.text_model.", "lm_head."),
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "embed_dim": 32,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "num_position_embeddings": 16,
}


def wrap(folder: Path, style: str = "inside", wrapper: str = "any_vl", **outer: object) -> Path:
    """Rewrite a folder with a text model alone as one that holds other models beside it; outer: settings that stand outside."""
    prefix, head = STYLES[style]
    others, places = {name: torch.ones(size) for name, size in OTHERS.items()}, {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = others
        for name, tensor in load_file(path).items():
            own = name.removeprefix("model.").removeprefix("language_model.")
            tensors[head + own.removeprefix("lm_head.") if own.startswith("lm_head.") else prefix + own] = tensor
        save_file(tensors, path)
        places |= dict.fromkeys(tensors, path.name)
        others = {}
    if (folder / INDEX).exists():
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    raw = json.loads((folder / "config.json").read_text())
    inner = {key: value for key, value in raw.items() if key not in outer}
    (folder / "config.json").write_text(
        json.dumps({"model_type": wrapper, "text_config": inner, "vision_config": {"depth": 1}, **outer})
    )
    return folder


def build_whole(folder: Path, model_type: str, text: dict[str, Any]) -> Path:
    """Write a tiny random model with a text model and a tower, as the library stores it."""
    plain = CONFIG_MAPPING[model_type]()
    vision = {**_VISION, "model_type": plain.vision_config.model_type}
    config = CONFIG_MAPPING[model_type](text_config={**text, "model_type": plain.text_config.model_type}, vision_config=vision)
    torch.manual_seed(0)
    with quiet_transformers():
        network = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config)
        randomise(network, plain.text_config.model_type)
        network.save_pretrained(folder)
    return folder


def whole_logits(folder: Path, cases: list[NumericsCase]) -> list[torch.Tensor]:
    """Logits of the whole model for text, without a cache, of eager attention."""
    with quiet_transformers(), torch.no_grad():
        config = transformers.AutoConfig.from_pretrained(folder)
        network_class = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
        network = network_class.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        return [network(input_ids=torch.tensor([case.tokens]), use_cache=False).logits[0] for case in cases]
