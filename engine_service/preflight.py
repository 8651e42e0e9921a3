"""Checks of an engine's config before torch is imported, which takes seconds.

Owns the error of a --model that is no model folder, and whether the machine has the memory that the weights will take: the
kernel would kill an engine in too small a control group in the middle of loading, without a message. Reads the headers of
weight files, not the weights. A config that passes can still fail when the model is loaded.
"""

import dataclasses
import importlib.util
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvkeeper.common.service import kernel
from kvkeeper.common.service.extras import install_command, missing
from kvkeeper.common.service.memory_limit import OutOfMemory, require
from kvkeeper.common.service.preflight import check_addresses
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.sizes import size
from kvkeeper.kernels.cpu.features import multiplies_bfloat16

from .config import GATEWAY_PACKAGE, HASH_TOY, EngineConfig, get_dtype, wants_compiled
from .model.checkpoint.errors import ModelError, UnsupportedModelError
from .model.checkpoint.hub_cache import SNAPSHOTS
from .model.checkpoint.json_file import CONFIG_FILE
from .model.checkpoint.text_part import WRAPPER, find_layer, read_text_config, text_name
from .model.checkpoint.unneeded import HEAD
from .model.config import not_native, parse_model_config, why_library
from .model.dtype_name import DTYPE_BYTES, FLOAT8, INTEGER_BITS, QUANTISED, dtype_name, weight_bytes
from .model.left_out import list_left_out, others_left_out

_WANTED = "a Hugging Face folder is wanted, with config.json and *.safetensors"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PACKAGES = ("torch", "safetensors", "tokenizers", "llguidance", "jinja2")  # of the extra `engine`, on every machine
_GPU_FILES = ("nvidia*", "dxg", "nvhost*", "nvmap")  # in /dev, on any machine on which CUDA can run
# Of torch, other imports, and a first step, measured 180 MB beside the weights, and of compiling kernels, 80 MB.
_PROGRAM_BYTES = 320 << 20
_FRONT_BYTES = 64 << 20  # of a front process: measured 40 MB, and room for streams


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory that loading a model takes, in bytes."""

    weights: int  # as the model computes with them
    beside: int  # while they are read: a tensor as it is stored, and of what is packed a layer that is not packed yet
    dtype: str


def check_start(config: EngineConfig) -> None:
    """Refuse a config that cannot work on this machine. Raises StartError."""
    check_packages()
    check_kernels(config)
    check_gateway(config)
    check_addresses(config.listen, config.metrics_listen, config.health_address)
    if config.device != "cpu" and not any(any(Path("/dev").glob(name)) for name in _GPU_FILES):
        raise StartError(f"--device {config.device}: this machine has no NVIDIA device")
    memory = model_memory(config)
    try:
        require(needed_bytes(config, memory))
    except OutOfMemory as error:
        text = f"its weights take {size(memory.weights)} in {memory.dtype}, and torch as much as {size(_PROGRAM_BYTES)}"
        raise StartError(f"--model {config.model}: {text}: {error}{_smaller_dtype(config, memory)}") from None


def _smaller_dtype(config: EngineConfig, memory: ModelMemory) -> str:
    """What to type for weights that fit, if any do."""
    for dtype in ("bfloat16", "int8", "int4"):
        if dtype in INTEGER_BITS and (missing("numba") or config.cpu_kernels == "torch"):
            continue
        smaller = dataclasses.replace(config, dtype=dtype)
        try:
            found = model_memory(smaller)
            require(needed_bytes(smaller, found))
        except (StartError, OutOfMemory):
            continue
        if found.weights < memory.weights:
            return f"; with --dtype {dtype} they take {size(found.weights)}"
    return ""


def check_kernel(config: EngineConfig) -> None:
    """Ranks beside the engine's process look for the end of that. Raises StartError."""
    kernel.require([kernel.ENDS_OF_PROCESSES] if config.tensor_parallel > 1 else [])


def check_packages() -> None:
    """Raises StartError where the extra `engine` is not installed; the client and the cache service do without it."""
    if names := missing(*_PACKAGES):
        text = f"the engine service needs {', '.join(names)}, which are not installed"
        raise StartError(f"{text}; install them with: {install_command('engine')}")


def check_kernels(config: EngineConfig) -> None:
    """Raises StartError where --cpu-kernels asks for those of the extra `cpu`, and it is not installed or not for this."""
    if config.cpu_kernels != "compiled":
        return
    if not wants_compiled(config):
        raise StartError("--cpu-kernels compiled: they are for --device cpu with --dtype float32, bfloat16, int8 or int4")
    if missing("numba"):
        raise StartError(f"--cpu-kernels compiled: numba is not installed; install it with: {install_command('cpu')}")


def check_gateway(config: EngineConfig) -> None:
    """Raises StartError where --gateway asks for the messages of the extra `gateway`, and it is not installed."""
    if config.gateway == "on" and missing(GATEWAY_PACKAGE):
        raise StartError(f"--gateway on: its messages are not installed; install them with: {install_command('gateway')}")


def needed_bytes(config: EngineConfig, memory: ModelMemory) -> int:
    """Memory of the host that the engine takes until it serves."""
    of_all_ranks = config.tensor_parallel * (_PROGRAM_BYTES + memory.beside)
    weights = memory.weights if config.device == "cpu" else 0
    return of_all_ranks + config.fronts * _FRONT_BYTES + weights


def model_memory(config: EngineConfig) -> ModelMemory:
    """The memory of the model and the draft model together. Raises StartError for a folder whose model cannot be served."""
    found = [ModelMemory(0, 0, "float32")]
    for flag, model in (("--model", config.model), ("--draft-model", config.draft_model)):
        if not model or model == HASH_TOY:
            continue
        try:
            found.append(check_model(Path(model), config))
        except ModelError as error:
            raise StartError(f"{flag} {model}: {error}") from None
    return ModelMemory(sum(each.weights for each in found), max(each.beside for each in found), found[-1].dtype)


def check_model(folder: Path, config: EngineConfig) -> ModelMemory:
    """Check a model folder without reading its weights. Raises ModelError."""
    from .model.checkpoint.safetensors_files import list_weight_files, tensor_sizes  # safetensors, of the extra `engine`

    _check_folder(folder)
    raw = read_text_config(folder)
    model_type = raw.get("model_type")
    has_library = importlib.util.find_spec("transformers") is not None
    model_config = None
    is_native = not why_library(raw, has_library=has_library)
    if is_native:
        model_config = parse_model_config(raw)
    elif not has_library:
        raise not_native(model_type)
    elif config.tensor_parallel > 1:
        raise UnsupportedModelError("tensor parallelism of model type", model_type, "the native families")
    elif config.dtype in QUANTISED:
        supported = f"the native families; {model_type} is computed by the transformers library"
        raise UnsupportedModelError("dtype", config.dtype, supported)
    own_dtype, device_type = raw.get("dtype", raw.get("torch_dtype")), config.device.partition(":")[0]
    has_bfloat16 = is_native and wants_compiled(config) and not missing("numba") and multiplies_bfloat16()
    dtype = dtype_name(own_dtype, device_type, get_dtype(config), has_bfloat16=has_bfloat16)
    sizes, scheme = list(tensor_sizes(list_weight_files(folder))), None if model_config is None else model_config.scheme
    names = [each.name for each in sizes]
    left_out = others_left_out(names, raw.get(WRAPPER, "")) if model_config is None else list_left_out(names, model_config)
    sizes = [each for each in sizes if each.name not in left_out]
    counts = [each.num_elements if scheme is None else scheme.num_weights(each.name, each.num_elements) for each in sizes]
    largest = max((each.num_bytes for each in sizes), default=0)
    if scheme is not None:  # what is restored from it is float32, and its scales are spread
        largest = max(largest, 8 * max(counts, default=0))
    by_name = {text_name(each.name): count for each, count in zip(sizes, counts, strict=True)}
    layers = Counter[int]()
    for name, count in by_name.items():
        if (layer := find_layer(name)) is not None:
            layers[layer] += count
    is_packed = is_native and device_type == "cpu"
    beside = largest + (max(layers.values(), default=0) * DTYPE_BYTES[dtype] if is_packed else 0)
    if config.dtype not in QUANTISED:
        return ModelMemory(sum(counts) * DTYPE_BYTES[dtype], beside, dtype)
    head = sum(count for name, count in by_name.items() if name.startswith(HEAD))
    dense = sum(counts) - layers.total() - head
    head_bytes = head * DTYPE_BYTES[dtype] if config.dtype == FLOAT8 else (head or dense) * weight_bytes("int8")
    of_products = layers.total() * weight_bytes(config.dtype) + head_bytes
    return ModelMemory(int(of_products) + dense * DTYPE_BYTES[dtype], beside, config.dtype)


def _check_folder(folder: Path) -> None:
    """Require a Hugging Face folder with a config.json. Raises ModelError."""
    if folder.suffix == ".gguf" and folder.is_file():
        raise ModelError(f"a GGUF file; {_WANTED}: {_convert(folder)}")
    if folder.is_file():
        raise ModelError(f"a file; {_WANTED}")
    if not folder.is_dir():
        raise ModelError(f"there is no such folder; nothing is downloaded, so it is a path on this machine{_download(folder)}")
    if not (folder / CONFIG_FILE).exists():
        if models := sorted(config.parents[2] for config in folder.glob(f"models--*/{SNAPSHOTS}")):
            raise ModelError(f"a hub's cache of several models; {_WANTED}, as {models[-1]}")
        if files := sorted(folder.glob("*.gguf")):
            raise ModelError(f"the folder has GGUF files; {_WANTED}: {_convert(files[0])}")
        raise ModelError(f"the folder has no {CONFIG_FILE}; {_WANTED}")


def _convert(file: Path) -> str:
    """What to type for a folder of a GGUF file."""
    return f"kvkeeper convert {shlex.quote(str(file))} {shlex.quote(file.stem)}"


def _download(folder: Path) -> str:
    """What to type for what looks like the name of a model on a hub."""
    name = str(folder)
    return f"; for a model of a hub: hf download {name} --local-dir {folder.name}" if _HUB_NAME.fullmatch(name) else ""
