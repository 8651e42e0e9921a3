"""load_model: a Hugging Face folder in, a Decoder out.

Weights are read one tensor at a time, straight into the fused matrices of the decoder, converted on the way to the dtype that
is computed in, and packed layer by layer. Every tensor is used, left out by its name (see unneeded), or refused.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

import structlog
import torch
from tqdm import tqdm

from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.cpu.features import multiplies_bfloat16
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.types import LinearWeight

from .checkpoint.errors import ModelFileMissingError, UnsupportedModelError, WeightsError
from .checkpoint.safetensors_files import StoredTensor, iterate_stored, iterate_tensors, list_weight_files, tensor_sizes
from .checkpoint.text_part import read_text_config, text_name
from .checkpoint.unneeded import EMBEDDINGS, HEAD
from .config import ModelConfig, read_model_config
from .decoder import Decoder, DecoderWeights
from .dtype_name import FLOAT8, INTEGER_BITS, QUANTISED, DtypeChoice, dtype_name
from .left_out import list_left_out
from .loading.filling import WEIGHT_DTYPES, Filling
from .loading.packing import Packing
from .quantised.matrix import restored
from .quantised.scheme import Scheme
from .split import WHOLE, Split, config_of_rank

log = structlog.get_logger()
Stored = TypeVar("Stored", torch.Tensor, StoredTensor)


def load_model(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: DtypeChoice = "auto",
    progress: bool = True,
    split: Split = WHOLE,
) -> tuple[Decoder, ModelConfig]:
    """Load the model in `folder`, or a rank's part of it. The config is of the whole model, as it was loaded.

    Args:
        device: where its weights go.
        dtype: what it computes in. auto: the weights' own, on a CPU float32 unless bfloat16 is fast. int8, int4: what products
            multiply; all else is as with auto, and on a CPU float32. fp8: the same on CUDA, and all else is bfloat16.
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
    sizes = list(tensor_sizes(files))
    left_out = list_left_out([each.name for each in sizes], config)
    names = [text_name(each.name) for each in sizes]
    has_head, has_embeddings = (any(name.startswith(module) for name in names) for module in (HEAD, EMBEDDINGS))
    config = _with_experts(config, names)
    is_tied = config.tied_embeddings
    config = replace(config, tied_embeddings=is_tied and not (has_head and has_embeddings))
    packing = Packing(config, split, FLOAT8 if dtype == FLOAT8 else INTEGER_BITS.get(dtype))
    filling = Filling(config, split, compute_dtype(config.weights_dtype, device, dtype), device, packing)
    if config.tied_embeddings and has_head:
        filling.take_head_as_embeddings()
    num_bytes = sum(each.num_bytes for each in sizes if each.name not in left_out)
    bar = tqdm(total=num_bytes, desc="loading", unit="B", unit_scale=True, file=sys.stderr, disable=not progress)
    with bar, _quantising_errors(folder, dtype):
        for file_name, name, tensor in _read(files, left_out, config.scheme, split, bar):
            filling.put(file_name, name, tensor)
        weights = filling.finish(folder.name)
        if is_tied and not config.tied_embeddings:
            weights, config = _tied_if_equal(weights, config)
        weights = packing.finish_rest(weights)
    if split.is_first:
        log_left_out(left_out)
    if config.scheme is not None:
        _log_scheme(config.scheme, names, weights.embed.dtype)
    _log_limit(folder, config)
    return Decoder(config_of_rank(config, split), weights, split=split), config


@contextmanager
def _quantising_errors(folder: Path, dtype: DtypeChoice) -> Iterator[None]:
    """Raises UnsupportedModelError where nothing multiplies numbers of so few bits here, WeightsError for odd weights."""
    try:
        yield
    except UnsupportedDeviceError:
        if dtype not in QUANTISED:
            raise
        supported = "the compiled kernels: the extra `cpu`, without --cpu-kernels torch"
        if dtype == FLOAT8:
            supported = "devices of compute capability 8.9 or later; int8 is for all"
        raise UnsupportedModelError("dtype", dtype, supported) from None
    except KernelArgumentError as error:
        if dtype not in QUANTISED:
            raise
        raise WeightsError(folder.name, f"--dtype {dtype}: {error.argument}s {error.problem}") from None


def _with_experts(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The same with experts as these tensors have them: one by one, or together."""
    if config.experts is None or not any(".experts.0." in name for name in names):
        return config
    return replace(config, experts=replace(config.experts, are_apart=True))


def _tied_if_equal(weights: DecoderWeights, config: ModelConfig) -> tuple[DecoderWeights, ModelConfig]:
    """Tie the head to the embeddings, as the config does. Where the file has both and they differ, the file's head counts."""
    assert isinstance(weights.lm_head, LinearWeight), "quantised when all are read"
    if torch.equal(weights.lm_head.data, weights.embed):
        return replace(weights, lm_head=LinearWeight(weights.embed)), replace(config, tied_embeddings=True)
    message = f"config.json ties {HEAD}weight to the embeddings, and the file has another one, which is used"
    log.warning("head_not_tied", message=message)
    return weights, config


def _read(
    files: tuple[Path, ...], left_out: Collection[str], scheme: Scheme | None, split: Split, bar: "tqdm[NoReturn]"
) -> Iterator[tuple[str, str, torch.Tensor | StoredTensor]]:
    """File, name and tensor of all that is not left out; of several ranks whole only where it has to be restored."""
    if scheme is not None:
        return restored(_counted(iterate_tensors(files, left_out), bar), scheme)
    if split.num_ranks == 1:
        return _counted(iterate_tensors(files, left_out), bar)
    return _counted(iterate_stored(files, left_out), bar)


def log_left_out(left_out: dict[str, str]) -> None:
    """One line for each reason, with the number of tensors that are left out for it."""
    for reason, count in Counter(left_out.values()).items():
        first = min(name for name, why in left_out.items() if why == reason)
        log.info("tensors_left_out", num_tensors=count, first=first, reason=reason)


def _log_limit(folder: Path, config: ModelConfig) -> None:
    said = read_text_config(folder).get("max_position_embeddings", 0)
    if config.max_position < said:
        reason = "longrope turns all keys anew when a sequence grows beyond it"
        log.info("model_length_limited", max_len=config.max_position, config_says=said, reason=reason)


def _log_scheme(scheme: Scheme, names: Sequence[str], dtype: torch.dtype) -> None:
    if any(scheme.split_name(name)[1] == scheme.scales for name in names):
        log.info("weights_dequantised", stored=scheme.name, dtype=str(dtype).removeprefix("torch."))
        return
    message = f"config.json says that weights are stored as {scheme.name}; none is, and all are taken as they are"
    log.warning("weights_not_quantised", message=message)


def _counted(tensors: Iterator[tuple[str, str, Stored]], bar: "tqdm[NoReturn]") -> Iterator[tuple[str, str, Stored]]:
    """The same by the names of the text model."""
    for file_name, name, tensor in tensors:
        bar.update(tensor.nbytes)
        yield file_name, text_name(name), tensor


def compute_dtype(weights_dtype: object, device: torch.device, choice: DtypeChoice, *, is_native: bool = True) -> torch.dtype:
    """The dtype of weights, K and V; weights_dtype is the config's word. Raises UnsupportedModelError.

    is_native: whether the compiled kernels multiply its weights.
    """
    has_bfloat16 = is_native and compiled.serves(torch.empty(0, dtype=torch.bfloat16)) and multiplies_bfloat16()
    return WEIGHT_DTYPES[dtype_name(weights_dtype, device.type, choice, has_bfloat16=has_bfloat16)]
