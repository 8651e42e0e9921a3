"""TransformersModel: any decoder-only model of the transformers library on the paged arena.

The library's own modules compute everything but attention: an attention function can be registered, and the one here stores K
and V in the arena and attends through the block tables, as the native decoder does. One dry run finds out what a model needs of
that function; what the arena cannot hold (layers of different shapes, recurrent states, attention sinks) is refused then. What
the dry run cannot show is found by the check that is handed in (compute/self_check.py), which computes prompts in both ways.
docs/operate/models.md says what came of it for each architecture. Slower than a native family: its projections are not fused.
Needs the extra `transformers`.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
import torch

from .attention import AttentionMetadata, StepAttention, attend
from .checkpoint.errors import UnsupportedModelError, WeightsError, name_first
from .checkpoint.text_part import TO_TEXT_NAMES, WHOLE, WRAPPER, read_text_config
from .config import close_to, not_native
from .dtype_name import QUANTISED, DtypeChoice
from .families.table import FAMILIES
from .left_out import others_left_out
from .loader import compute_dtype, log_left_out
from .stored_attention import StoredAttention

_KEEPS_NOTHING: Final = frozenset(("mlp", "moe"))
_ALIBI: Final = ("build_alibi_tensor", "build_mpt_alibi_tensor")  # names of the library's functions


def why_not_paged(config: Any, network_class: Any) -> str:
    """Why a model of this config and this class of network cannot be paged; empty: no reason is known."""
    for field, unit in (("index_topk", "tokens"), ("index_topk_blocks", "blocks")):
        if isinstance(most := getattr(config.get_text_config(), field, None), int):
            chosen = "it chooses the tokens that it reads by an index of its own"
            return f"{chosen}; computed from all of them, its answers would differ beyond {most} {unit}"
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    attends = {kind for kind in kinds if kind.endswith("attention") and kind != "linear_attention"}
    others = [kind for kind in kinds if kind not in attends | _KEEPS_NOTHING]
    if others or getattr(network_class, "_is_stateful", False):
        layers = f"{len(others)} of its {len(kinds)} layers keep" if others else "its layers keep"
        named = f" ({', '.join(sorted(set(others)))})" if others else ""
        ours = ", ".join(name for name, family in FAMILIES.items() if family.recurrent is not None)
        return f"{layers} a state of their own for each sequence{named}, which this engine computes for {ours} alone"
    module = sys.modules.get(getattr(network_class, "__module__", ""))
    says_alibi = getattr(config, "alibi", getattr(getattr(config, "attn_config", None), "alibi", True))
    if says_alibi and any(hasattr(module, name) for name in _ALIBI):
        return "it adds a bias by distance to attention scores (ALiBi), which this engine's attention does not have"
    return ""


log = structlog.get_logger()

_NAME: Final = "kvkeeper_paged"
_INTERFACE: Final = "models all of whose layers attend through the library's attention interface, without other states"
_OWN_CODE: Final = "its attention is code of its own, which the library cannot replace"
_PLAIN: Final = "plain attention, windows and soft caps"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine needs to know of a model beside its forward pass; fields are those of ModelConfig."""

    vocab_size: int
    max_position: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    query_groups: frozenset[int]
    rope_parameters: str
    chunks: tuple[int | None, ...] = ()  # a model with them is served up to their size
    is_latent: bool = False  # the library's own K and V are stored, whatever they are made of
    reads: tuple[int, ...] = ()

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one layer gave its attention function. group: heads of queries for one of K and V."""

    group: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    has_soft_cap: bool


@dataclass(frozen=True, slots=True)
class _Step:
    """Where the attention of the forward pass under way finds its K and V."""

    kv_view: torch.Tensor  # see StepAttention
    metadata: AttentionMetadata
    windows: tuple[int | None, ...]


_under_way: ContextVar[_Step | dict[int, _Seen]] = ContextVar("kvkeeper_forward")


class TransformersModel:
    """A model of the transformers library in place of a Decoder. Made by load_transformers_model."""

    def __init__(self, network: Any, config: ModelShape) -> None:
        self.config = config
        self.dtype: torch.dtype = network.dtype
        self.device: torch.device = network.device
        self._network = network

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._network.parameters())

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        max_position: int,
        metadata: StepAttention | StoredAttention,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """As Decoder.forward, with K and V as they are computed."""
        assert isinstance(metadata, StepAttention), "such a model is refused where K and V are stored in another format"
        with _during(_Step(metadata.views[0], metadata.groups[0], self.config.windows)):
            output = self._network(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=logit_rows
            )
        return output.logits[0].float()


class LibraryCheck(Protocol):
    """Compares `model`, which is `network` on the paged arena, with `network` itself.

    Returns the length up to which they agree. Raises UnsupportedModelError where they differ.
    """

    def __call__(self, model: TransformersModel, network: Any, model_type: object, *, soft_cap: bool) -> int: ...


def load_transformers_model(
    folder: Path, model_type: object, dtype: DtypeChoice, *, device: torch.device, progress: bool, check: LibraryCheck
) -> TransformersModel:
    """Load the model in `folder` through transformers, from safetensors alone and without code of its own.

    Args:
        check: compares the model on the paged arena with the library's own forward pass.

    Raises:
        UnsupportedModelError: the library is not installed or does not know the model; its attention cannot be paged, or gives
            other logits on the paged arena than by itself.
        WeightsError: weights do not load or are missing.
    """
    if dtype in QUANTISED:
        supported = f"the native families; {model_type} is computed by the transformers library"
        raise UnsupportedModelError("dtype", dtype, supported)
    try:
        import transformers
    except ImportError:
        raise not_native(model_type) from None
    _register(transformers)
    if not progress:
        transformers.logging.disable_progress_bar()
    raw = read_text_config(folder)
    wrapper = raw.pop(WRAPPER, "")
    try:
        config = (
            transformers.AutoConfig.for_model(**raw)
            if wrapper
            else transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )
    except (ValueError, KeyError, OSError):
        supported = f"the native families, and what the library knows{close_to(model_type, transformers.CONFIG_MAPPING)}"
        why = f"transformers {transformers.__version__} does not know it"
        raise UnsupportedModelError("model type", model_type, supported, why) from None
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping or config.is_encoder_decoder:
        why = WHOLE.get(str(model_type), "")
        if wrapper:
            why = why_not_paged(config, None) or f"the library has no model for the text part of {wrapper} alone"
        raise UnsupportedModelError("model type", model_type, "decoder-only language models", why)
    if why := why_not_paged(config, transformers.AutoModelForCausalLM._model_mapping[type(config)]):
        raise UnsupportedModelError("model type", model_type, _INTERFACE, why)
    network_dtype = compute_dtype(_weights_dtype(config), device, dtype, is_native=False)
    network = _load_network(transformers, folder, config, wrapper, network_dtype)
    network.eval().to(device)
    try:
        seen = _dry_run(network, model_type)
        shape = _make_shape(network, seen, model_type)
        has_soft_cap = any(layer.has_soft_cap for layer in seen)
        proven = check(TransformersModel(network, shape), network, model_type, soft_cap=has_soft_cap)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from the code of any architecture, called in a way that its author did not foresee
        supported = f"models that run on flat batches without masks; this one stops with {_first(error)}"
        raise UnsupportedModelError("model type", model_type, supported) from error
    if proven < shape.max_position:
        reason = "config.json names this length, and a model of this size was not compared beyond it"
        log.info("model_length_limited", max_len=proven, config_says=shape.max_position, reason=reason)
    return TransformersModel(network, dataclasses.replace(shape, max_position=proven))


def _weights_dtype(config: Any) -> object:
    return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)


def _load_network(transformers: Any, folder: Path, config: Any, wrapper: str, dtype: torch.dtype) -> Any:
    """wrapper: the type of what the model is the text part of, or empty. Errors as load_transformers_model."""
    model_type, verbosity = config.model_type, transformers.logging.get_verbosity()
    if wrapper:  # else it warns of each tensor of other parts
        transformers.logging.set_verbosity_error()
    try:
        network, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            key_mapping=TO_TEXT_NAMES if wrapper else None,
            dtype=dtype,
            attn_implementation=_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError) as error:
        raise WeightsError(folder.name, _first(error)) from None
    except Exception as error:  # of the code of any architecture, or a library that it needs
        if _NAME in str(error):
            raise UnsupportedModelError("model type", model_type, _INTERFACE, _OWN_CODE) from None
        raise UnsupportedModelError("model type", model_type, f"what the library loads here; {_first(error)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    if missing := info["missing_keys"]:  # the library would make them up
        raise WeightsError(folder.name, f"tensors are missing: {name_first(missing)}")
    left_out = others_left_out(info["unexpected_keys"], wrapper)
    log_left_out(left_out)
    if unused := set(info["unexpected_keys"]) - left_out.keys():
        # Those that the library itself names as unneeded are not among them.
        problem = f"tensors are not part of the model that config.json describes: {name_first(unused)}"
        raise WeightsError(folder.name, f"{problem}; the library would leave them out")
    return network


def _first(error: Exception) -> str:
    """The kind of an error, and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


@torch.inference_mode()
def _dry_run(network: Any, model_type: object) -> list[_Seen]:
    """What each layer needs of attention, found out with two tokens."""
    seen: dict[int, _Seen] = {}
    two = torch.tensor([[0, 1]], device=network.device)
    with _during(seen):
        network(input_ids=two, position_ids=two, use_cache=False)
    if not seen or sorted(seen) != list(range(network.config.get_text_config().num_hidden_layers)):
        raise UnsupportedModelError("model type", model_type, _INTERFACE, _OWN_CODE)
    layers = [seen[index] for index in sorted(seen)]
    if len(shapes := {(layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1:
        why = "its layers have " + " and ".join(f"{heads} heads of {dims}" for heads, dims in sorted(shapes))
        raise UnsupportedModelError("model type", model_type, "models whose layers have K and V of one shape", why)
    return layers


def _make_shape(network: Any, layers: list[_Seen], model_type: object) -> ModelShape:
    config = network.config.get_text_config()
    max_position = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_position, int):
        raise UnsupportedModelError("model type", model_type, "models whose config.json has max_position_embeddings")
    horizon, reason = min(_horizons(network, config), default=(max_position, ""))
    if horizon < max_position:
        log.info("model_length_limited", max_len=horizon, config_says=max_position, reason=reason)
    return ModelShape(
        vocab_size=config.vocab_size,
        max_position=min(max_position, horizon),
        num_layers=len(layers),
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        windows=tuple(layer.window for layer in layers),
        query_groups=frozenset(layer.group for layer in layers),
        rope_parameters=repr(getattr(config, "rope_parameters", None)),
    )


def _horizons(network: Any, config: Any) -> Iterator[tuple[int, str]]:
    """Lengths beyond which K and V of a token are not the same for every continuation, or attention is not what we compute.

    Up to the least of them, nothing of it shows.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            yield rope["original_max_position_embeddings"], "longrope turns all keys anew when a sequence grows beyond it"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        yield config.attention_chunk_size, "attention is by chunks of this length"
    for module in network.modules():
        if getattr(module, "attn_temperature_tuning", False):
            # The library takes a token's place in the batch for its position. Its factor is 1 before floor_scale.
            module.attn_temperature_tuning = False
            yield int(module.floor_scale) - 1, "queries are scaled by their position from there on"


def _register(transformers: Any) -> None:
    """No mask function of this name is known to the library, so it makes no masks; block tables and windows say it all."""
    transformers.AttentionInterface.register(_NAME, _attention)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention function: query [1, N, T, D], key and value [1, M, T, D]; returns [1, T, N, D]."""
    step = _under_way.get()
    if attention_mask is not None:  # the library makes none for us, so this one is the model's own
        raise UnsupportedModelError("attention", f"{type(module).__name__} with a mask of its own", _PLAIN)
    if isinstance(step, dict):
        if module.layer_idx in step:
            raise UnsupportedModelError("attention", type(module).__name__, "layers that attend once")
        step[module.layer_idx] = _look(module, query, key, value, sliding_window, softcap, others)
        return query.new_zeros(query.transpose(1, 2).shape), None
    heads = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    layer_idx = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(
        heads[0],
        heads[1].contiguous(),
        heads[2].contiguous(),
        step.kv_view[:, layer_idx],
        step.metadata,
        scale,
        step.windows[layer_idx],
        softcap,
    )
    return out[None], None


def _look(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    soft_cap: float | None,
    others: dict[str, Any],
) -> _Seen:
    name = type(module).__name__
    if key.shape != value.shape or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        shapes = f"keys of one layer are {tuple(key.shape[1::2])} heads and dimensions, values {tuple(value.shape[1::2])}"
        raise UnsupportedModelError("attention", name, "keys and values of one shape", shapes)
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError("attention", name, "causal attention")
    for asked in ("s_aux", "position_bias", "head_mask"):
        if others.get(asked) is not None:
            raise UnsupportedModelError("attention", f"{name} with {asked}", _PLAIN)
    return _Seen(query.shape[1] // key.shape[1], key.shape[1], key.shape[3], window, soft_cap is not None)


@contextlib.contextmanager
def _during(what: _Step | dict[int, _Seen]) -> Iterator[None]:
    token = _under_way.set(what)
    try:
        yield
    finally:
        _under_way.reset(token)
