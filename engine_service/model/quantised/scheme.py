"""Scheme: how the projections of a checkpoint are stored, read from `quantization_config` of its config.json.

What would change results, or is not understood, is refused with the name of the field. Schemes of activations are not: they
say how a server may round what it multiplies the weights with, and here nothing of it is rounded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..checkpoint.errors import ModelConfigError, UnsupportedModelError
from ..checkpoint.json_file import CONFIG_FILE

Form = Literal["gptq", "awq", "packed", "plain", "mxfp4"]

FIELD: Final = "quantization_config"
_WORD_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's projections are stored.

    Attributes:
        form: gptq, awq and packed have several numbers in each 32-bit integer; plain has one in each 8 bits;
            mxfp4 has two in each 8 bits (matrix.py).
        bits: of a number.
        scales: the tensor with the scales. group_size: inputs that share one; 0: one for each output, or for all.
        block: outputs and inputs that share a scale, where it is more than one output.
        has_zeros: whether numbers are stored with zero points. zero_offset: what is to be added to those.
        has_order: whether the inputs of a group lie apart, and a tensor says which group each is of.
    """

    form: Form
    bits: int
    scales: str
    group_size: int = 0
    block: tuple[int, int] | None = None
    has_zeros: bool = False
    zero_offset: int = 0
    has_order: bool = False

    @property
    def name(self) -> str:
        """For people."""
        kind = {"gptq": "GPTQ", "awq": "AWQ", "packed": "packed", "plain": "plain", "mxfp4": "MXFP4"}[self.form]
        return f"{kind}, {self.bits} bit"

    def split_name(self, name: str) -> tuple[str, str]:
        """The module of a stored tensor, or with mxfp4 the weight that it belongs to, and the last part of its name."""
        if self.form == "mxfp4":
            weight, _, part = name.rpartition("_")
            return (weight, part) if part in ("blocks", "scales") else (name, "")
        module, _, part = name.rpartition(".")
        return module, part

    def get_name(self, module: str) -> str:
        """The name of the whole weight, as a checkpoint that is not quantised has it."""
        return module if self.form == "mxfp4" else f"{module}.weight"

    def num_weights(self, tensor: str, num_elements: int) -> int:
        """Numbers of the model in a stored tensor of so many elements."""
        part = self.split_name(tensor)[1]
        if self.form == "mxfp4":
            return {"blocks": 2 * num_elements, "scales": 0}.get(part, num_elements)
        if part in ("qweight", "weight_packed"):
            return num_elements * (_WORD_BITS // self.bits)
        return num_elements if part in ("weight", "bias") else 0


def parse_scheme(raw: Mapping[str, Any]) -> Scheme | None:
    """Read the scheme from the object of a config.json; None: nothing is quantised.

    Raises:
        ModelConfigError: a value of the wrong type.
        UnsupportedModelError: a method or a setting that is not read here.
    """
    said = raw.get(FIELD)
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise ModelConfigError(CONFIG_FILE, f"{FIELD} must be an object, is {said!r}")
    method = said.get("quant_method")
    parse = METHODS.get(method) if isinstance(method, str) else None
    if parse is None:
        raise UnsupportedModelError(f"{FIELD}.quant_method", method, ", ".join(sorted(METHODS)))
    return parse(said)


def _gptq(said: Mapping[str, Any]) -> Scheme:
    """AutoGPTQ and GPTQModel (Frantar et al., arXiv 2210.17323). The first version stores zero points less 1."""
    version = _parse_choice(said, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    bits = _parse_choice(said, "bits", None, (4, 8))
    offset = 1 if version == "gptq" else 0
    return Scheme("gptq", bits, "scales", _group_size(said), has_zeros=True, zero_offset=offset, has_order=True)


def _awq(said: Mapping[str, Any]) -> Scheme:
    """AutoAWQ (Lin et al., arXiv 2306.00978), in its `gemm` version."""
    _parse_choice(said, "version", "gemm", ("gemm",))
    _parse_choice(said, "zero_point", True, (True,))
    return Scheme("awq", _parse_choice(said, "bits", None, (4,)), "scales", _group_size(said), has_zeros=True)


def _fp8(said: Mapping[str, Any]) -> Scheme:
    """A scheme by blocks, as of DeepSeek-V3 (arXiv 2412.19437), or with one scale for a weight."""
    _parse_choice(said, "fmt", "e4m3", ("e4m3",))
    block = said.get("weight_block_size")
    return Scheme("plain", 8, "weight_scale") if block is None else Scheme("plain", 8, "weight_scale_inv", block=_block(block))


def _mxfp4(said: Mapping[str, Any]) -> Scheme:
    """The experts of gpt-oss (arXiv 2508.10925). What its config names as not converted is stored as plain numbers."""
    return Scheme("mxfp4", 4, "scales")


def _compressed_tensors(said: Mapping[str, Any]) -> Scheme:
    """The format of the vLLM project's compressor, of which all groups of layers have to be stored in one way."""
    form = _parse_choice(said, "format", None, ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"))
    sparsity = said.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _refused("sparsity_config", sparsity, "dense weights")
    if said.get("transform_config"):
        raise _refused("transform_config", "present", "weights without transforms")
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ModelConfigError(CONFIG_FILE, f"{FIELD}.config_groups must be an object of objects")
    schemes = {_weights_scheme(form, group) for group in groups.values()}
    if len(schemes) > 1:
        raise _refused("config_groups", f"{len(schemes)} kinds of weights", "one kind of weights")
    return schemes.pop()


def _weights_scheme(form: str, group: Mapping[str, Any]) -> Scheme:
    if group.get("output_activations"):
        raise _refused("output_activations", "present", "outputs as they are computed")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise ModelConfigError(CONFIG_FILE, f"{FIELD}.config_groups must say how weights are stored")
    is_float = _parse_choice(weights, "type", "int", ("int", "float")) == "float"
    bits = _parse_choice(weights, "num_bits", 8, (8,) if is_float or form == "int-quantized" else (4, 8))
    strategy = _parse_choice(weights, "strategy", "tensor", ("tensor", "channel", "group", "block"))
    _parse_choice(weights, "dynamic", False, (False,))
    order = _parse_choice(weights, "actorder", None, (None, False, True, "weight", "group", "static", "dynamic"))
    if is_float and form == "pack-quantized":
        raise _refused("format", form, "float-quantized for weights of type float")
    block = _block(weights.get("block_structure")) if strategy == "block" else None
    return Scheme(
        "packed" if form == "pack-quantized" else "plain",
        bits,
        "weight_scale",
        _group_size(weights) if strategy == "group" else 0,
        block,
        has_zeros=not _parse_choice(weights, "symmetric", True, (True, False)),
        has_order=order in (True, "group", "dynamic"),
    )


# By `quant_method`.
METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], Scheme]]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


def _parse_choice(said: Mapping[str, Any], key: str, default: Any, allowed: tuple[Any, ...]) -> Any:
    """A value that is one of these; absent or null is the default."""
    value = default if said.get(key) is None else said[key]
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        raise _refused(key, value, ", ".join(str(each) for each in allowed))
    return value


def _group_size(said: Mapping[str, Any]) -> int:
    size = said.get("group_size", -1)
    if type(size) is not int or not (size == -1 or 0 < size < 2**31):
        raise ModelConfigError(CONFIG_FILE, f"{FIELD}.group_size must be -1 or a positive integer, is {size!r}")
    return max(size, 0)


def _block(said: Any) -> tuple[int, int]:
    if not isinstance(said, list) or len(said) != 2 or not all(type(side) is int and 0 < side < 2**31 for side in said):
        raise ModelConfigError(CONFIG_FILE, f"{FIELD} must name two sides of a block, names {said!r}")
    return said[0], said[1]


def _refused(key: str, found: object, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{FIELD}.{key}", found, supported)
