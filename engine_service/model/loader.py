"""load_model: a Hugging Face folder in, a Decoder out.

Weights are read one tensor at a time, straight into the fused matrices of the decoder, and converted on the way to
the dtype that is computed in.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import structlog
import torch
from tqdm import tqdm

from kvkeeper.kernels.errors import UnsupportedDeviceError

from .checkpoint.errors import ModelFileMissingError, UnsupportedModelError, WeightsError
from .checkpoint.json_fields import CONFIG_FILE
from .checkpoint.json_file import read_json_object
from .checkpoint.safetensors_files import StoredTensor, iterate_stored, iterate_tensors, list_weight_files
from .config import ModelConfig, read_model_config
from .decoder import Decoder
from .dtype_name import INT8, DtypeChoice, dtype_name
from .families.table import FAMILIES
from .parallel.split import WHOLE, Split, config_of_rank
from .quantised.restored import restored
from .weight_map import allocate_weights, biases_added_up, norms_of, pair_rotated

log = structlog.get_logger()
Stored = TypeVar("Stored", torch.Tensor, StoredTensor)

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, INT8: torch.float32}


def load_model(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: DtypeChoice = "auto",
    progress: bool = True,
    split: Split = WHOLE,
) -> tuple[Decoder, ModelConfig]:
    """Load the model in `folder`, or a rank's part of it. The config is of the whole model.

    Args:
        device: where its weights go.
        dtype: what it computes in. auto: the weights' own dtype, but float32 on a CPU. int8: products of 8-bit integers.
        progress: show a progress bar on stderr.
        split: the rank; of what it does not have nothing is read, unless the checkpoint is quantised.

    Raises:
        ModelFileMissingError: the folder, config.json, or a weight file is absent.
        ModelConfigError: config.json or the index is malformed.
        UnsupportedModelError: another architecture, rope type, weight format, dtype, or number of ranks.
        WeightsError: a damaged file; a tensor missing, unexpected, or of another shape.
    """
    folder, device = Path(folder), torch.device(device)
    if not folder.is_dir():
        raise ModelFileMissingError(f"model folder {folder}")
    config = read_model_config(folder)
    files = list_weight_files(folder)
    weights, destinations = allocate_weights(config, compute_dtype(config.weights_dtype, device, dtype), device, split)
    family = FAMILIES[config.family]
    ignored = _LAYER if family.ignores_later_layers else None
    num_bytes = sum(file.stat().st_size for file in files)
    bar = tqdm(total=num_bytes, desc="loading", unit="B", unit_scale=True, file=sys.stderr, disable=not progress)
    with bar:
        tensors: Iterator[tuple[str, str, torch.Tensor | StoredTensor]]
        if config.scheme is not None:
            tensors = restored(_counted(iterate_tensors(files), bar), config.scheme)
        elif split.num_ranks == 1:
            tensors = _counted(iterate_tensors(files), bar)
        else:
            tensors = _counted(iterate_stored(files), bar)
        has_no_head = config.tied_embeddings or not split.is_first
        for file_name, name, tensor in tensors:
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and has_no_head):
                continue  # written by old versions of transformers, and follows from config.json; or not of this rank
            if ignored is not None and (found := ignored.match(name)) and int(found[1]) >= config.num_layers:
                continue
            if family.ignores and name.startswith(family.ignores):
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
    if not split.is_first:
        for bias in biases_added_up(weights):
            bias.zero_()
    own = config_of_rank(config, split)
    pair_rotated(own, weights)
    if config.scheme is not None:
        dtype_text = str(weights.embed.dtype).removeprefix("torch.")
        log.info("weights_dequantised", stored=config.scheme.name, dtype=dtype_text)
    said = read_json_object(folder / CONFIG_FILE)["max_position_embeddings"]
    if config.max_position < said:
        reason = "longrope turns all keys anew when a sequence grows beyond it"
        log.info("model_length_limited", max_len=config.max_position, config_says=said, reason=reason)
    try:
        return Decoder(own, weights, is_int8=dtype == INT8, split=split), config
    except UnsupportedDeviceError:
        raise UnsupportedModelError("dtype", INT8, "CPUs for which torch has FBGEMM: x86 with AVX2") from None


def _counted(tensors: Iterator[tuple[str, str, Stored]], bar: "tqdm[NoReturn]") -> Iterator[tuple[str, str, Stored]]:
    for file_name, name, tensor in tensors:
        bar.update(tensor.nbytes)
        yield file_name, name, tensor


def compute_dtype(weights_dtype: object, device: torch.device, choice: DtypeChoice) -> torch.dtype:
    """The dtype of weights, K and V; weights_dtype is the config's word. Raises UnsupportedModelError."""
    return _DTYPES[dtype_name(weights_dtype, device.type, choice)]
