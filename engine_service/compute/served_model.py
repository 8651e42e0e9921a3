"""ServedModel: everything that the service needs to know about a model of any kind.

Loads a Hugging Face folder, or takes the hash toy, and says what identifies its KV: name, revision (SHA-256 over config
and weights), shape, rope parameters, window. The tokenizer is not part of that: it does not change what KV means.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import structlog
import torch

from kvkeeper.kernels.attention.flashinfer_prefill import find_flashinfer
from kvkeeper.kernels.quantised.formats import KvFormat

from ..config import HASH_TOY, MAX_TOKENS, EngineConfig, get_dtype
from ..model.checkpoint.digest import weights_digest
from ..model.checkpoint.errors import ModelConfigError, ModelError, NoDeviceError, UnsupportedModelError
from ..model.checkpoint.json_file import CONFIG_FILE, read_json_object
from ..model.checkpoint.safetensors_files import list_weight_files, tensor_sizes
from ..model.checkpoint.text_part import WRAPPER, read_text_config, text_name
from ..model.checkpoint.unneeded import EMBEDDINGS, HEAD
from ..model.chunked import check_chunks
from ..model.config import ModelConfig, parse_model_config, why_library
from ..model.decoder import Decoder
from ..model.dtype_name import QUANTISED, DtypeChoice
from ..model.hash_toy import HashToyConfig, HashToyRunner
from ..model.layer_groups import LayerGroup
from ..model.left_out import list_left_out
from ..model.loader import load_model
from ..model.split import WHOLE, Split, require_one_rank
from ..outputs.model_text import ModelText
from ..outputs.tokenizer import Tokenizer
from ..values.sampling_params import NEUTRAL, SamplingParams, SamplingParamsError, with_fields
from .cpu_kernels import prepare_kernels
from .graphs.graph_api import CudaGraphs
from .model_runner import AnyLayout, Model, ModelRunner, Runner, StepBounds, Warmed, make_kv_layout
from .self_check import load_checked_model
from .stored_model import (
    format_for,
    has_states,
    kv_groups,
    prepare_for,
    refuse_settings,
    refuse_stored,
    state_groups,
    stored_layout,
)

_FILE: Final = "generation_config.json"
_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")


def read_sampling_defaults(folder: Path) -> SamplingParams:
    """Read the sampling defaults of a model folder. Raises ModelConfigError for a value that no request may have."""
    path = folder / _FILE
    raw = read_json_object(path) if path.is_file() else {}
    given = {name: value for name in _FIELDS if (value := raw.get(name)) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelConfigError(_FILE, f"{name} must be a number, is {value!r}")
    try:
        return with_fields(NEUTRAL, given)
    except SamplingParamsError as error:
        raise ModelConfigError(_FILE, str(error)) from None


log = structlog.get_logger()

SAVES_MEMORY = "--tensor-parallel of the engine divides the weights"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model. layout takes the block size, make_runner puts the model on a view of an arena."""

    model_id: str  # the model's own name, which says with the revision whose K and V it is
    revision: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_len: int
    compute_dtype: str
    text: ModelText
    layout: Callable[[int], AnyLayout]
    make_runner: Callable[[torch.Tensor, Any], Runner]
    make_ready: Callable[[Runner, StepBounds], None] | None = None  # before the runner's first step, in a thread; None: at once
    sliding_window: int = 0
    rope_parameters: str = ""
    sampling_defaults: SamplingParams = NEUTRAL  # where a request names no field
    groups: tuple[LayerGroup, ...] = ()  # of its layers; empty: a block has all of them
    whole: "ServedModel | None" = None  # the same with all layers in a block, where it has groups
    refuses_retention: str = ""  # why it cannot attend to sinks and a window of one sequence; empty: it can
    device: torch.device = _CPU
    kv_format: str = ""  # what K and V are stored in; empty: what it computes in
    num_ranks: int = 1  # that share the model; layout and runner are of this one
    text_part_of: str = ""  # the type of the model that it is the text part of; empty: it stands alone
    served_as: str = ""  # what clients call it; empty: by its own name

    @property
    def name(self) -> str:
        """The name that clients use and that people are shown."""
        return self.served_as or self.model_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return self.text.tokenizer.eos_ids if self.text.tokenizer else frozenset()


def load_served_model(config: EngineConfig, split: Split = WHOLE) -> ServedModel:
    """Load what --model names, or a rank's part of it. Raises ModelError."""
    if config.model == HASH_TOY:
        return _hash_toy(split)
    folder, dtype = Path(config.model).resolve(), cast(DtypeChoice, get_dtype(config))
    device = _select_device(config, split.num_ranks)
    progress = config.progress and sys.stderr.isatty()  # in a log file a bar is noise
    raw = read_text_config(folder) if (folder / CONFIG_FILE).is_file() else {}
    if reason := why_library(raw, has_library=find_spec("transformers") is not None):
        require_one_rank(raw["model_type"], split.num_ranks)
        refuse_stored(config.kv_dtype, "models that the transformers library runs")
        log.info("model_through_transformers", model_type=raw["model_type"], reason=reason)
        model = load_checked_model(folder, raw["model_type"], dtype, device=device, progress=progress)
        prepare_kernels(model.dtype, device)
        ropes = model.config.rope_parameters
        served = _from_folder(folder, raw, model, _name(model.dtype), model.num_parameters, ropes)
        return _ready_on_device(served, config, progress=progress)
    decoder, model_config = load_model(folder, device=device, dtype=dtype, progress=progress, split=split)
    prepare_kernels(decoder.dtype, device)
    check_chunks(model_config.chunks, config.block_size)
    both = [rope and dataclasses.asdict(rope) for rope in (model_config.rope, model_config.local_rope)]
    name = dtype if dtype in QUANTISED else _name(decoder.dtype)
    served = _from_folder(folder, raw, decoder, name, _num_parameters(folder, model_config), json.dumps(both))
    served = _by_kind(dataclasses.replace(served, num_ranks=split.num_ranks), decoder, config)
    return _ready_on_device(served, config, progress=progress)


def most_tokens(config: EngineConfig) -> int:
    """The most tokens that a prompt may have: as configured, else as config.json says, else 0. The model is not loaded for it.

    With retention a sequence may get longer than the model has positions, but no prompt comes whole that does.
    """
    if config.max_tokens_per_sequence is not None:
        return config.max_tokens_per_sequence
    if config.model == HASH_TOY:
        return HashToyConfig().max_position
    try:
        raw = read_text_config(Path(config.model))
        by_library = why_library(raw, has_library=find_spec("transformers") is not None)
        positions = raw.get("max_position_embeddings") if by_library else parse_model_config(raw).max_position
    except (ModelError, OSError):
        return 0  # the load says what is wrong
    return min(positions, MAX_TOKENS) if isinstance(positions, int) else 0


def _by_kind(served: ServedModel, model: Decoder, config: EngineConfig) -> ServedModel:
    """The same, as its kind of cache wants it. Raises UnsupportedModelError where the configuration does not go with it."""
    if has_states(model.config):
        refuse_settings(config)
        checkpoint_blocks = max(config.checkpoint_tokens // config.block_size, 1)
        return _in_groups(served, model, state_groups(model, config.block_size, checkpoint_blocks))
    if (kv_format := format_for(config.kv_dtype, model.dtype)) is not None:
        if model.config.is_latent:
            refuse_stored(config.kv_dtype, "models with latent attention")
        if any(model.config.chunks):
            refuse_stored(config.kv_dtype, "models with chunked attention")
        if model.config.layer_heads:
            refuse_stored(config.kv_dtype, "models whose layers have K and V of several shapes")
        if model.config.kv_sources:
            refuse_stored(config.kv_dtype, "models whose layers share K and V")
        return _as_stored(served, model, kv_format, config)
    groups = kv_groups(model.config) if config.groups else ()
    if model.config.layer_heads:
        if not config.groups:
            kind = "of layers with K and V of several shapes"
            raise UnsupportedModelError("--no-groups", kind, "models whose layers have K and V of one shape")
        return _in_groups(served, model, groups)
    return dataclasses.replace(_in_groups(served, model, groups), whole=served) if groups else served


def _in_groups(served: ServedModel, model: Decoder, groups: tuple[LayerGroup, ...]) -> ServedModel:
    """The same with groups of its layers."""
    dtype = model.dtype
    return dataclasses.replace(
        served,
        layout=lambda block_size: make_kv_layout(model.config, dtype, block_size, groups),
        make_runner=lambda kv_view, layout: ModelRunner(model, kv_view, layout, groups),
        groups=groups,
    )


def _as_stored(served: ServedModel, model: Decoder, kv_format: KvFormat, config: EngineConfig) -> ServedModel:
    """The same with K and V in this format. Raises UnsupportedModelError for heads that the format cannot hold."""
    if any(model.config.windows):
        log.info("kv_windows_kept", message="layers with windows keep all tokens, because K and V are stored by --kv-dtype")
    prepare_for(model, kv_format)
    _, groups = stored_layout(model, kv_format, config.block_size, config.kv_tail_tokens)
    whole = dataclasses.replace(
        served,
        layout=lambda block_size: stored_layout(model, kv_format, block_size, 0)[0],
        make_runner=lambda kv_view, layout: ModelRunner(model, kv_view, layout),
        refuses_retention=f"a model whose K and V are stored in {kv_format.name}",
        kv_format=kv_format.name,
    )
    if not groups or config.role != "both":
        return whole
    return dataclasses.replace(
        whole,
        layout=lambda block_size: stored_layout(model, kv_format, block_size, config.kv_tail_tokens)[0],
        make_runner=lambda kv_view, layout: ModelRunner(model, kv_view, layout, groups),
        groups=groups,
        whole=whole,
        kv_format=f"{kv_format.name} with a tail of {config.kv_tail_tokens} tokens",
    )


def _ready_on_device(served: ServedModel, config: EngineConfig, *, progress: bool) -> ServedModel:
    """The same, with what is to be done on a device before the first step. served: as its kind of cache wants it."""
    if served.device.type != "cuda":
        return served

    def make_ready(runner: Runner, bounds: StepBounds) -> None:
        assert isinstance(runner, Warmed), "made by this model"
        graphs = CudaGraphs(served.device) if config.graphs else None
        with_retention = bounds.may_retain and not served.refuses_retention
        found = find_flashinfer(wanted=config.flashinfer)
        runner.make_ready(bounds, graphs, with_retention=with_retention, progress=progress, flashinfer=found)

    whole = None if served.whole is None else _ready_on_device(served.whole, config, progress=progress)
    return dataclasses.replace(served, make_ready=make_ready, whole=whole)


def _select_device(config: EngineConfig, num_ranks: int) -> torch.device:
    """The device of the first rank; the others are on the next ones. Raises NoDeviceError where torch does not see them."""
    device = torch.device(config.device)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) + num_ranks > count:
        raise NoDeviceError(config.device, count)
    return device


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def own_name(folder: Path) -> str:
    """The name of a model's folder, or ORG/NAME where a hub's client keeps it as models--ORG--NAME/snapshots/HASH."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def _from_folder(
    folder: Path, raw: dict[str, Any], model: Model, compute_dtype: str, num_parameters: int, rope_parameters: str
) -> ServedModel:
    config, dtype = model.config, model.dtype
    architectures = raw.get("architectures") or [raw.get("model_type")]
    return ServedModel(
        model_id=own_name(folder),
        revision=weights_digest(folder),
        architecture=str(architectures[0]),
        num_parameters=num_parameters,
        vocab_size=config.vocab_size,
        max_len=config.max_position,
        compute_dtype=compute_dtype,
        text=ModelText(Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None),
        layout=lambda block_size: make_kv_layout(config, dtype, block_size),
        make_runner=lambda kv_view, layout: ModelRunner(model, kv_view, layout),
        sliding_window=max((window or 0 for window in config.windows), default=0),
        rope_parameters=rope_parameters,
        sampling_defaults=read_sampling_defaults(folder),
        refuses_retention=_refuses_retention(model),
        device=model.device,
        text_part_of=raw.get(WRAPPER, ""),
    )


def _refuses_retention(model: Model) -> str:
    """Why the model cannot use retention; empty: it can. Retention rotates queries a second time, and needs full attention."""
    if not isinstance(model, Decoder):
        return "a model that the transformers library runs"
    if has_states(model.config):
        return "a model with recurrent layers"
    if model.config.is_latent:
        return "a model whose cache holds latents"
    if any(model.config.chunks):
        return "a model with chunks of its own"
    if model.config.temperature is not None:
        return "a model whose queries grow with their position"
    return "a model with windows of its own" if any(model.config.windows) else ""


def _hash_toy(split: Split) -> ServedModel:
    config = HashToyConfig()
    return ServedModel(
        model_id=HASH_TOY,
        revision="1",
        architecture="HashToy",
        num_parameters=0,
        vocab_size=config.vocab_size,
        max_len=config.max_position,
        compute_dtype="uint64",
        text=ModelText(None),
        layout=config.kv_layout,
        make_runner=lambda kv_view, layout: HashToyRunner(config, kv_view, layout, split),
        num_ranks=split.num_ranks,
    )


def _num_parameters(folder: Path, config: ModelConfig) -> int:
    """Elements of the weights that are used; tied tensors count once, also where the files hold them twice."""
    sizes, scheme = list(tensor_sizes(list_weight_files(folder))), config.scheme
    names = [each.name for each in sizes]
    left_out = set(list_left_out(names, config))
    if config.tied_embeddings and any(text_name(name).startswith(EMBEDDINGS) for name in names):
        left_out |= {name for name in names if text_name(name).startswith(HEAD)}
    return sum(
        num_elements if scheme is None else scheme.num_weights(name, num_elements)
        for name, num_elements, _ in sizes
        if name not in left_out
    )
