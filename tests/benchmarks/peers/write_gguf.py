"""A Llama of a Hugging Face folder as llama.cpp reads it: `python write_gguf.py FOLDER KIND FILE`, where gguf can be imported.

KIND is of gguf's: F32, BF16, Q8_0 or another; norms are float32 in each. The folder has no tokenizer, and llama.cpp loads no
model without one, so that each token gets a name; prompts are token ids.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def add_names(writer: gguf.GGUFWriter, config: dict) -> None:
    """A name for each token of the vocabulary."""
    size = config["vocab_size"]
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    names, kinds = ["<unk>", "<s>", "</s>"], [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    names += [f"<0x{byte:02X}>" for byte in range(256)]  # it looks for those
    kinds += [gguf.TokenType.BYTE] * 256
    writer.add_token_list([*names, *(f"t{token}" for token in range(len(names), size))])
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (size - len(kinds))])
    writer.add_token_scores([0.0] * size)


def write(folder: str, kind: str, file: str, add_tokenizer: Callable[[gguf.GGUFWriter, dict], None] = add_names) -> None:
    config = json.loads(Path(folder, "config.json").read_text())
    quantization = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    add_tokenizer(writer, config)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, weight in load_file(Path(folder, "model.safetensors")).items():
        theirs = _name(name.removesuffix(".weight"))
        if num_heads := heads.get(theirs.rpartition(".")[2]):
            weight = _interleaved(weight, num_heads)
        raw = weight if weight.ndim == 1 else gguf.quants.quantize(weight, quantization)
        writer.add_tensor(f"{theirs}.weight", raw, raw_dtype=None if weight.ndim == 1 else quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    if outer := _OUTER_NAMES.get(name):
        return outer
    layer, _, inner = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[inner]}"


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours in a head, transformers the halves of it: the same numbers in another order."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


if __name__ == "__main__":
    _, _folder, _kind, _file = sys.argv
    write(_folder, _kind, _file)
