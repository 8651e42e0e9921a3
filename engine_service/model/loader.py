"""load_model: a Hugging Face folder in, a Decoder out.

Weights are read one tensor at a time, straight into the fused matrices of the decoder, and converted on the way to
the dtype that is computed in.
"""

import re
import sys
from pathlib import Path
from typing import Final, NoReturn

import structlog
import torch
from tqdm import tqdm

from kvkeeper.kernels.errors import UnsupportedDeviceError

from .checkpoint.errors import ModelFileMissingError, UnsupportedModelError, WeightsError
from .checkpoint.json_fields import CONFIG_FILE
from .checkpoint.json_file import read_json_object
from .checkpoint.safetensors_files import iterate_tensors, list_weight_files
from .config import ModelConfig, read_model_config
from .decoder import Decoder
from .dtype_name import INT8, DtypeChoice, dtype_name
from .families.table import FAMILIES
from .quantised.restored import Tensors, restored
from .weight_map import allocate_weights, norms_of, pair_rotated

log = structlog.get_logger()

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, INT8: torch.float32}


def load_model(
    folder: Path, *, device: torch.device | str = "cpu", dtype: DtypeChoice = "auto", progress: bool = True
) -> tuple[Decoder, ModelConfig]:
    """Load the model in `folder`.

    Args:
        device: where its weights go.
        dtype: what it computes in. auto: the weights' own dtype, but float32 on a CPU. int8: products of 8-bit integers.
        progress: show a progress bar on stderr.

    Raises:
        ModelFileMissingError: the folder, config.json, or a weight file is absent.
        ModelConfigError: config.json or the index is malformed.
        UnsupportedModelError: another architecture, rope type, weight format, or dtype.
        WeightsError: a damaged file; a tensor missing, unexpected, or of another shape.
    """
    folder, device = Path(folder), torch.device(device)
    if not folder.is_dir():
        raise ModelFileMissingError(f"model folder {folder}")
    config = read_model_config(folder)
    files = list_weight_files(folder)
    weights, destinations = allocate_weights(config, compute_dtype(config.weights_dtype, device, dtype), device)
    ignored = _LAYER if FAMILIES[config.family].ignores_later_layers else None
    num_bytes = sum(file.stat().st_size for file in files)
    bar = tqdm(total=num_bytes, desc="loading", unit="B", unit_scale=True, file=sys.stderr, disable=not progress)
    with bar:
        tensors = _counted(files, bar)
        if config.scheme is not None:
            tensors = restored(tensors, config.scheme)
        for file_name, name, tensor in tensors:
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings):
                continue  # written by old versions of transformers; follows from config.json
            if ignored is not None and (found := ignored.match(name)) and int(found[1]) >= config.num_layers:
                continue
            destination = destinations.pop(name, None)
            if destination is None:
                raise WeightsError(file_name, f"tensor {name} is not part of this model, or is stored twice")
            if tuple(tensor.shape) != destination.shape:
                problem = f"tensor {name} has shape {tuple(tensor.shape)}, must have {destination.shape}"
                raise WeightsError(file_name, problem)
            if tensor.dtype not in _DTYPES.values():
                raise UnsupportedModelError(
                    "weight dtype", str(tensor.dtype), ", ".join(name for name in _DTYPES if name != INT8)
                )
            destination.fill(tensor)
    if destinations:
        raise WeightsError(folder.name, f"{len(destinations)} tensors are missing, among them {min(destinations)}")
    if config.norm_offset:
        for norm in norms_of(weights):
            norm.add_(1)
    pair_rotated(config, weights)
    if config.scheme is not None:
        dtype_text = str(weights.embed.dtype).removeprefix("torch.")
        log.info("weights_dequantised", stored=config.scheme.name, dtype=dtype_text)
    said = read_json_object(folder / CONFIG_FILE)["max_position_embeddings"]
    if config.max_position < said:
        reason = "longrope turns all keys anew when a sequence grows beyond it"
        log.info("model_length_limited", max_len=config.max_position, config_says=said, reason=reason)
    try:
        return Decoder(config, weights, is_int8=dtype == INT8), config
    except UnsupportedDeviceError:
        raise UnsupportedModelError("dtype", INT8, "CPUs for which torch has FBGEMM: x86 with AVX2") from None


def _counted(files: tuple[Path, ...], bar: "tqdm[NoReturn]") -> Tensors:
    for file_name, name, tensor in iterate_tensors(files):
        bar.update(tensor.nbytes)
        yield file_name, name, tensor


def compute_dtype(weights_dtype: object, device: torch.device, choice: DtypeChoice) -> torch.dtype:
    """The dtype of weights, K and V; weights_dtype is the config's word. Raises UnsupportedModelError."""
    return _DTYPES[dtype_name(weights_dtype, device.type, choice)]
