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
from typing import Any, cast

import structlog
import torch

from kvkeeper.kernels.layout import KvLayout

from ..config import HASH_TOY, EngineConfig
from ..model.checkpoint.digest import weights_digest
from ..model.checkpoint.errors import NoDeviceError
from ..model.checkpoint.json_fields import CONFIG_FILE
from ..model.checkpoint.json_file import read_json_object
from ..model.checkpoint.safetensors_files import list_weight_files, tensor_sizes
from ..model.config import ModelConfig, why_library
from ..model.decoder import Decoder
from ..model.dtype_name import INT8, DtypeChoice
from ..model.hash_toy import HashToyConfig, HashToyRunner
from ..model.layer_groups import LayerGroup, group_layers
from ..model.loader import load_model
from ..outputs.model_text import ModelText
from ..outputs.tokenizer import Tokenizer
from ..values.sampling_params import NEUTRAL, SamplingParams
from .graphs.graph_api import CudaGraphs
from .model_runner import Model, ModelRunner, Runner, StepBounds, kv_layout_of
from .sampling_defaults import read_sampling_defaults
from .self_check import load_checked_model

log = structlog.get_logger()

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model. layout takes the block size, make_runner puts the model on a view of an arena."""

    model_id: str
    revision: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_len: int
    compute_dtype: str
    text: ModelText
    layout: Callable[[int], KvLayout]
    make_runner: Callable[[torch.Tensor, KvLayout], Runner]
    make_ready: Callable[[Runner, StepBounds], None] | None = None  # before the runner's first step, in a thread; None: at once
    sliding_window: int = 0
    rope_parameters: str = ""
    sampling_defaults: SamplingParams = NEUTRAL  # where a request names no field
    groups: tuple[LayerGroup, ...] = ()  # of its layers; empty: a block has all of them
    whole: "ServedModel | None" = None  # the same with all layers in a block, where it has groups
    refuses_retention: str = ""  # why it cannot attend to sinks and a window of one sequence; empty: it can
    device: torch.device = _CPU

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return self.text.tokenizer.eos_ids if self.text.tokenizer else frozenset()


def load_served_model(config: EngineConfig) -> ServedModel:
    """Load what --model names. Raises ModelError."""
    if config.model == HASH_TOY:
        return _hash_toy()
    folder, dtype = Path(config.model).resolve(), cast(DtypeChoice, config.dtype)
    device = _device_of(config)
    progress = config.progress and sys.stderr.isatty()  # in a log file a bar is noise
    raw = read_json_object(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    if reason := why_library(raw, has_library=find_spec("transformers") is not None):
        log.info("model_through_transformers", model_type=raw["model_type"], reason=reason)
        model = load_checked_model(folder, raw["model_type"], dtype, device=device, progress=progress)
        ropes = model.config.rope_parameters
        served = _from_folder(folder, raw, model, _name(model.dtype), model.num_parameters, ropes)
        return _ready_on_device(served, config, progress=progress)
    decoder, model_config = load_model(folder, device=device, dtype=dtype, progress=progress)
    both = [rope and dataclasses.asdict(rope) for rope in (model_config.rope, model_config.local_rope)]
    name = INT8 if dtype == INT8 else _name(decoder.dtype)
    served = _from_folder(folder, raw, decoder, name, _num_parameters(folder, model_config), json.dumps(both))
    return _in_groups(_ready_on_device(served, config, progress=progress), decoder, config)


def _in_groups(served: ServedModel, model: Decoder, config: EngineConfig) -> ServedModel:
    """The same with groups of its layers, where it has layers with windows beside full ones and the configuration lets it.

    Sequences with several tables are not handed over, so engines of one role do without.
    """
    groups, dtype = group_layers(model.config.windows), model.dtype
    if not groups or not config.groups or config.role != "both":
        return served
    return dataclasses.replace(
        served,
        layout=lambda block_size: kv_layout_of(model.config, dtype, block_size, groups),
        make_runner=lambda kv_view, layout: ModelRunner(model, kv_view, layout, groups),
        groups=groups,
        whole=served,
    )


def _ready_on_device(served: ServedModel, config: EngineConfig, *, progress: bool) -> ServedModel:
    """The same, with what is to be done on a device before the first step."""
    if served.device.type != "cuda":
        return served

    def make_ready(runner: Runner, bounds: StepBounds) -> None:
        assert isinstance(runner, ModelRunner), "made by this model"
        graphs = CudaGraphs(served.device) if config.graphs else None
        runner.make_ready(bounds, graphs, with_retention=not served.refuses_retention, progress=progress)

    return dataclasses.replace(served, make_ready=make_ready)


def _device_of(config: EngineConfig) -> torch.device:
    """Raises NoDeviceError where torch does not see it."""
    device = torch.device(config.device)
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        raise NoDeviceError(config.device, count)
    return device


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _from_folder(
    folder: Path, raw: dict[str, Any], model: Model, compute_dtype: str, num_parameters: int, rope_parameters: str
) -> ServedModel:
    config, dtype = model.config, model.dtype
    architectures = raw.get("architectures") or [raw.get("model_type")]
    return ServedModel(
        model_id=folder.name,
        revision=weights_digest(folder),
        architecture=str(architectures[0]),
        num_parameters=num_parameters,
        vocab_size=config.vocab_size,
        max_len=config.max_position,
        compute_dtype=compute_dtype,
        text=ModelText(Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None),
        layout=lambda block_size: kv_layout_of(config, dtype, block_size),
        make_runner=lambda kv_view, layout: ModelRunner(model, kv_view, layout),
        sliding_window=max((window or 0 for window in config.windows), default=0),
        rope_parameters=rope_parameters,
        sampling_defaults=read_sampling_defaults(folder),
        refuses_retention=_refuses_retention(model),
        device=model.device,
    )


def _refuses_retention(model: Model) -> str:
    """Why the model cannot use retention; empty: it can. Retention rotates queries a second time, and needs full attention."""
    if not isinstance(model, Decoder):
        return "a model that the transformers library runs"
    if model.config.is_latent:
        return "a model whose cache holds latents"
    return "a model with windows of its own" if any(model.config.windows) else ""


def _hash_toy() -> ServedModel:
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
        make_runner=lambda kv_view, layout: HashToyRunner(config, kv_view, layout),
    )


def _num_parameters(folder: Path, config: ModelConfig) -> int:
    """Elements of the weight files; tied tensors count once, also where old files hold them twice."""
    scheme = config.scheme
    return sum(
        num_elements if scheme is None else scheme.num_weights(name, num_elements)
        for name, num_elements, _ in tensor_sizes(list_weight_files(folder))
        if not (name.endswith("inv_freq") or (name == "lm_head.weight" and config.tied_embeddings))
    )
