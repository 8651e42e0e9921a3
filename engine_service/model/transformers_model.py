"""TransformersModel: any decoder-only model of the transformers library on the paged arena.

The library's own modules compute everything but attention: it lets an attention function be registered, and ours stores K and V
in the arena and attends through the block tables, as the native decoder does. What a model asks of that function is found out
once, by a dry run; what the arena cannot hold (layers of different shapes, recurrent states, attention sinks) is refused then.
Slower than a native family, because its projections are not fused. Needs the extra `transformers`.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from engine_service.errors import UnsupportedModelError, WeightsError
from engine_service.model.attention import AttentionMetadata, attend
from engine_service.model.dtype_name import DtypeChoice
from engine_service.model.loader import compute_dtype
from kvkeeper.service.extras import install_command

_NAME: Final = "kvkeeper_paged"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine needs to know of a model beside its forward pass; fields are those of ModelConfig."""

    vocab_size: int
    max_position: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope_parameters: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one layer gave its attention function."""

    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class _Step:
    """Where the attention of the forward pass under way finds its K and V."""

    kv_view: torch.Tensor
    metadata: AttentionMetadata
    windows: tuple[int | None, ...]


_under_way: ContextVar[_Step | dict[int, _Seen]] = ContextVar("kvkeeper_forward")


class TransformersModel:
    """See the module; a stand-in for Decoder. Made by load_transformers_model."""

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
        kv_view: torch.Tensor,
        metadata: AttentionMetadata,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """As Decoder.forward."""
        with _during(_Step(kv_view, metadata, self.config.windows)):
            output = self._network(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=logit_rows
            )
        return output.logits[0].float()


def load_transformers_model(
    folder: Path, model_type: object, dtype: DtypeChoice, *, device: torch.device, progress: bool
) -> TransformersModel:
    """Load the model in `folder` through transformers, from safetensors alone and without code of its own.

    Raises:
        UnsupportedModelError: the library is not installed, does not know the model, or its attention cannot be paged.
        WeightsError: the weights do not load.
    """
    try:
        import transformers
    except ImportError:
        supported = f"the native families; more with: {install_command('transformers')}"
        raise UnsupportedModelError("model type", model_type, supported) from None
    _register(transformers)
    if not progress:
        transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError):
        raise UnsupportedModelError("model type", model_type, "what the transformers library knows") from None
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping or config.is_encoder_decoder:
        raise UnsupportedModelError("model type", model_type, "decoder-only language models")
    try:
        network = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=compute_dtype(getattr(config, "dtype", None), device, dtype),
            attn_implementation=_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        network.eval().to(device)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            "attention", str(error).splitlines()[0][:200], "the library's attention interface"
        ) from None
    except (OSError, RuntimeError) as error:
        raise WeightsError(folder.name, str(error).splitlines()[0][:200]) from None
    return TransformersModel(network, _shape_of(network, model_type))


@torch.inference_mode()
def _shape_of(network: Any, model_type: object) -> ModelShape:
    """By a dry run of two tokens, in which attention only looks at what it is given."""
    seen: dict[int, _Seen] = {}
    two = torch.tensor([[0, 1]], device=network.device)
    with _during(seen):
        network(input_ids=two, position_ids=two, use_cache=False)
    config = network.config.get_text_config()
    layers = [seen[index] for index in sorted(seen)]
    if not layers or sorted(seen) != list(range(config.num_hidden_layers)):
        raise UnsupportedModelError("model type", model_type, "models all of whose layers have attention")
    if len({(layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1:
        raise UnsupportedModelError("model type", model_type, "models whose layers have K and V of one shape")
    return ModelShape(
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        num_layers=len(layers),
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        windows=tuple(layer.window for layer in layers),
        rope_parameters=repr(getattr(config, "rope_parameters", None)),
    )


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
    """The library's attention function: query [1, N, T, D], key and value [1, M, T, D]; answers [1, T, N, D]."""
    step = _under_way.get()
    if isinstance(step, dict):
        step[module.layer_idx] = _look(module, query, key, value, sliding_window, others)
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
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, others: dict[str, Any]
) -> _Seen:
    name = type(module).__name__
    if key.shape != value.shape or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise UnsupportedModelError("attention", name, "keys and values of one shape")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError("attention", name, "causal attention")
    for asked in ("s_aux", "position_bias", "head_mask"):
        if others.get(asked) is not None:
            raise UnsupportedModelError("attention", f"{name} with {asked}", "plain attention, windows and soft caps")
    return _Seen(key.shape[1], key.shape[3], window)


@contextlib.contextmanager
def _during(what: _Step | dict[int, _Seen]) -> Iterator[None]:
    token = _under_way.set(what)
    try:
        yield
    finally:
        _under_way.reset(token)
