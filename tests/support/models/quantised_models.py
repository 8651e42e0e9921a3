"""Tiny models stored as the hub stores quantised ones, and the same weights as plain numbers.

Packers of each format from its public description, a number at a time where that is what it says. Owns no unpacking: the plain
weights are computed from the numbers before they are packed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.tiny_models import TinyModel, build_model_folder

Tensors = dict[str, torch.Tensor]
# A projection's weight [out, in] in, the tensors that stand for it and the weight that they mean out.
Pack = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]

GROUP = 16


@dataclass(frozen=True, slots=True)
class Quantised:
    """A format: its name, what config.json says of it, and its packer."""

    name: str
    said: dict[str, Any]
    pack: Pack


def build_both(folder: Path, model: TinyModel, format_: Quantised, *, skipped: str = "lm_head") -> tuple[Path, Path]:
    """A folder in this format, and one with the weights that it means. Modules whose name holds `skipped` stay as they are."""
    plain = build_model_folder(folder / "plain", model)
    tensors = load_file(plain / "model.safetensors")
    if model.family == "Qwen3_5MoeText":
        tensors = _apart(tensors)
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if format_.name == "mxfp4" and name.endswith("experts." + name.rpartition(".")[2]) and not name.endswith("_bias"):
            parts, meant = format_.pack(tensor.numpy().astype(np.float64))
            stored |= {f"{name}_{part}": value.contiguous() for part, value in parts.items()}
            tensors[name] = torch.from_numpy(meant.astype(np.float32))
            continue
        module = name.removesuffix(".weight")
        if format_.name == "mxfp4" or not module.endswith(("_proj", "w1", "w2", "w3")) or skipped in module:
            stored[name] = tensor
            continue
        parts, meant = format_.pack(tensor.numpy().astype(np.float64))
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
        tensors[name] = torch.from_numpy(np.ascontiguousarray(meant, np.float32))
    packed = folder / "packed"
    packed.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": format_.said}))
    # Weights of a module lie in two files, the way that a shard's end may fall.
    halves = [dict(sorted(stored.items())[start::2]) for start in (0, 1)]
    for number, half in enumerate(halves):
        save_file(half, packed / f"model-{number}.safetensors")
    places = {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file(tensors, plain / "model.safetensors")
    return packed, plain


def _apart(tensors: Tensors) -> Tensors:
    """Experts one by one, each with its outputs first, as tools that quantise products have them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            found[name] = tensor
            continue
        parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {kind: 0}
        for index, expert in enumerate(tensor):
            for part, half in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{module}.{index}.{part}.weight"] = half.contiguous()
    return found


def _grouped(weight: np.ndarray, group: int, bits: int, *, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in] from 0 on, scales and zero points [out, groups]; scales are float16."""
    num_out, num_in = weight.shape
    parts = weight.reshape(num_out, num_in // group, group)
    top = (1 << bits) - 1
    if symmetric:
        scales = np.abs(parts).max(2) / (top // 2)
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        least, most = np.minimum(parts.min(2), 0), np.maximum(parts.max(2), 0)
        scales = (most - least) / top
        zeros = np.round(-least / scales)
    scales = scales.astype(np.float16).astype(np.float64)
    codes = np.clip(np.round(parts / scales[..., None]) + zeros[..., None], 0, top)
    return codes.reshape(num_out, num_in).astype(np.int64), scales, zeros.astype(np.int64)


def _meant(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    return (codes - zeros[:, group_of]) * scales[:, group_of]


def _words(values: np.ndarray, bits: int, places: tuple[int, ...]) -> torch.Tensor:
    """Along the first dimension: place p of a word holds the number that is p-th in `places`."""
    each = 32 // bits
    padded = np.zeros((-(-len(values) // each) * each, values.shape[1]), np.int64)
    padded[: len(values)] = values
    words = np.zeros((len(padded) // each, values.shape[1]), np.int64)
    for word in range(len(words)):
        for place in range(each):
            words[word] |= padded[word * each + places[place]] << (bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _gptq(bits: int, *, offset: int, shuffled: bool, symmetric: bool) -> Pack:
    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        num_in = weight.shape[1]
        order = np.random.default_rng(num_in).permutation(num_in) if shuffled else np.arange(num_in)
        codes, scales, zeros = _grouped(weight[:, order], GROUP, bits, symmetric=symmetric)
        back = np.argsort(order)
        codes, group_of = codes[:, back], back // GROUP
        zeros = np.maximum(zeros, 1) if offset else zeros  # 0 cannot be stored less 1
        in_turn = tuple(range(32 // bits))
        parts = {
            "qweight": _words(codes.T, bits, in_turn),
            "qzeros": _words(zeros - offset, bits, in_turn).T,
            "scales": torch.from_numpy(scales.T.astype(np.float16)),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return parts, _meant(codes, scales, zeros, group_of)

    return pack


def _awq(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    codes, scales, zeros = _grouped(weight, GROUP, 4, symmetric=False)
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": _words(codes, 4, places).T,
        "qzeros": _words(zeros, 4, places).T,
        "scales": torch.from_numpy(scales.T.astype(np.float16)),
    }
    return parts, _meant(codes, scales, zeros, np.arange(weight.shape[1]) // GROUP)


def _packed(bits: int, *, group: int | None, symmetric: bool) -> Pack:
    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        num_in = weight.shape[1]
        size = group or num_in
        codes, scales, zeros = _grouped(weight, size, bits, symmetric=symmetric)
        in_turn = tuple(range(32 // bits))
        parts = {
            "weight_packed": _words(codes.T, bits, in_turn).T,
            "weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
            "weight_shape": torch.tensor(weight.shape),
        }
        scales = parts["weight_scale"].double().numpy()
        if not symmetric:
            parts["weight_zero_point"] = _words(zeros, bits, in_turn)
        return parts, _meant(codes, scales, zeros, np.arange(num_in) // size)

    return pack


def _integers(*, symmetric: bool) -> Pack:
    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        num_in = weight.shape[1]
        codes, scales, zeros = _grouped(weight, num_in, 8, symmetric=symmetric)
        parts = {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": torch.from_numpy(scales).half()}
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
        return parts, _meant(codes, scales, zeros, np.zeros(num_in, np.int64))

    return pack


def _floats(block: tuple[int, int] | None, scale_name: str, *, by_row: bool = False) -> Pack:
    """block: sides of the parts with a scale each; None: the rows, or all."""

    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        num_out, num_in = weight.shape
        high, wide = block or ((1, num_in) if by_row else (num_out, num_in))
        rows, columns = np.arange(num_out) // high, np.arange(num_in) // wide
        scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
        np.maximum.at(scales, (rows[:, None], columns[None]), np.abs(weight).astype(np.float32) / 448)
        spread = scales[rows][:, columns]
        codes = torch.from_numpy((weight / spread).astype(np.float32)).to(torch.float8_e4m3fn)
        parts = {"weight": codes, scale_name: torch.from_numpy(scales if by_row or block else scales.reshape(1))}
        return parts, codes.float().numpy() * spread

    return pack


def _mxfp4(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Of experts [E, in, out], each number as the nearest that 4 bits have."""
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = weight.transpose(0, 2, 1).reshape(weight.shape[0], weight.shape[2], -1, 32)
    powers = np.ceil(np.log2(np.abs(blocks).max(3) / 6)).astype(np.int64)
    scaled = blocks / 2.0 ** powers[..., None]
    nearest = np.abs(np.abs(scaled)[..., None] - values).argmin(-1)
    codes = nearest + 8 * (scaled < 0)
    parts = {
        "blocks": torch.from_numpy((codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)),
        "scales": torch.from_numpy((powers + 127).astype(np.uint8)),
    }
    meant = np.where(scaled < 0, -1, 1) * values[nearest] * 2.0 ** powers[..., None]
    return parts, meant.reshape(weight.shape[0], weight.shape[2], -1).transpose(0, 2, 1).copy()


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP}
_BY_GROUP = {"strategy": "group", "group_size": GROUP, "type": "int"}

MXFP4 = Quantised("mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, _mxfp4)
FORMATS = (
    Quantised("gptq", _GPTQ | {"bits": 4, "desc_act": False}, _gptq(4, offset=1, shuffled=False, symmetric=True)),
    Quantised("gptq_uneven", _GPTQ | {"bits": 4, "sym": False}, _gptq(4, offset=1, shuffled=False, symmetric=False)),
    Quantised("gptq_act_order", _GPTQ | {"bits": 4, "desc_act": True}, _gptq(4, offset=1, shuffled=True, symmetric=True)),
    Quantised("gptq_8", _GPTQ | {"bits": 8}, _gptq(8, offset=1, shuffled=False, symmetric=True)),
    Quantised(
        "gptq_v2",
        _GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"},
        _gptq(4, offset=0, shuffled=True, symmetric=False),
    ),
    Quantised("awq", {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    Quantised(
        "packed_4",
        _compressed("pack-quantized", num_bits=4, symmetric=True, **_BY_GROUP),
        _packed(4, group=GROUP, symmetric=True),
    ),
    Quantised(
        "packed_4_uneven",
        _compressed("pack-quantized", num_bits=4, symmetric=False, **_BY_GROUP),
        _packed(4, group=GROUP, symmetric=False),
    ),
    Quantised(
        "packed_8_by_channel",
        _compressed("pack-quantized", num_bits=8, strategy="channel", type="int"),
        _packed(8, group=None, symmetric=True),
    ),
    Quantised("integers", _compressed("int-quantized", num_bits=8, strategy="channel", type="int"), _integers(symmetric=True)),
    Quantised(
        "integers_uneven",
        _compressed("int-quantized", num_bits=8, strategy="channel", type="int", symmetric=False),
        _integers(symmetric=False),
    ),
    Quantised(
        "floats_by_channel",
        _compressed("float-quantized", num_bits=8, strategy="channel", type="float"),
        _floats(None, "weight_scale", by_row=True),
    ),
    Quantised(
        "floats_by_tensor",
        _compressed("float-quantized", num_bits=8, strategy="tensor", type="float"),
        _floats(None, "weight_scale"),
    ),
    Quantised(
        "fp8_by_block",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [24, 40]},
        _floats((24, 40), "weight_scale_inv"),
    ),
    Quantised("fp8_by_tensor", {"quant_method": "fp8", "activation_scheme": "static"}, _floats(None, "weight_scale")),
)
