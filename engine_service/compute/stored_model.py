"""A served model that keeps something else than K and V in the type that it computes in.

That is K and V in another format (--kv-dtype), with the tail that goes with it; or, of recurrent layers, states, which can be
neither taken back by a token, nor split, nor rounded. Owns which format that is, what is refused, and how the layers are cut
into groups.
"""

import dataclasses

import torch

from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.cpu.quantised import prepare
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.quantised.formats import FORMATS, KvFormat
from kvkeeper.kernels.quantised.layout import QuantisedLayout

from ..config import EngineConfig
from ..model.checkpoint.errors import UnsupportedModelError
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.layer_groups import LayerGroup, group_layers, group_states
from ..model.recurrent.recurrent_config import state_bytes
from ..model.stored_attention import count_tail_layers


def format_for(kv_dtype: str, dtype: torch.dtype) -> KvFormat | None:
    """The format that --kv-dtype names for a model that computes in `dtype`; None: that very type."""
    kv_format = FORMATS.get(kv_dtype)
    return None if kv_format is None or kv_format.dtype is dtype else kv_format


def refuse_stored(kv_dtype: str, what: str) -> None:
    """Raise UnsupportedModelError for a model that --kv-dtype cannot serve."""
    if kv_dtype != "auto":
        raise UnsupportedModelError("--kv-dtype", kv_dtype, f"native families; auto for {what}")


def stored_layout(
    model: Decoder, kv_format: KvFormat, block_size: int, tail_tokens: int
) -> tuple[QuantisedLayout, tuple[LayerGroup, ...]]:
    """The layout of a model's blocks, and its groups of layers: all of them, and the tail's; none without a tail.

    tail_tokens: most tokens of the tail, in whole blocks. Raises UnsupportedModelError for heads that the format cannot hold.
    """
    shape = model.config
    sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size
    try:
        layout = QuantisedLayout(*sizes, kv_format, model.dtype)
    except KernelArgumentError as error:
        raise UnsupportedModelError("--kv-dtype", kv_format.name, str(error)) from None
    if not tail_tokens or not kv_format.scale_bytes:
        return layout, ()
    count = count_tail_layers(layout, tail_tokens)
    every = tuple(range(shape.num_layers))
    window = max(tail_tokens - block_size + 1, 1)  # its blocks hold tail_tokens at most
    tails = (LayerGroup(every[first : first + count], window) for first in range(0, shape.num_layers, count))
    return dataclasses.replace(layout, tail_layers=count), (LayerGroup(every, None), *tails)


def prepare_for(model: Decoder, kv_format: KvFormat) -> None:
    """Compile what computes with this format on a CPU, before a request waits for it."""
    if compiled.serves_floats(torch.empty(0, dtype=model.dtype, device=model.device)):
        prepare(kv_format)


def kv_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """The groups of the layers that store K and V, in the type that the model computes in."""
    stored = slice(config.num_kv_layers)
    heads = [config.kv_heads(layer) for layer in range(config.num_kv_layers)] if config.layer_heads else ()
    return group_layers(config.windows[stored], config.chunks[stored], heads)


_WHAT = "models without recurrent layers"


def has_states(config: ModelConfig) -> bool:
    """Whether any layer keeps a state."""
    return config.recurrent is not None and bool(config.recurrent.layers)


def state_groups(model: Decoder, block_size: int, checkpoint_blocks: int) -> tuple[LayerGroup, ...]:
    """The groups of such a model. Raises UnsupportedModelError where a block is too small for a state."""
    config = model.config
    assert config.recurrent is not None, "asked of models with states"
    return group_states(
        {config.mixing.index(layer) for layer in config.recurrent.layers},
        len(config.mixing),
        state_bytes(config.recurrent.shape.state, model.dtype.itemsize),
        (1 if config.is_latent else 2) * config.num_kv_heads * config.head_dim * model.dtype.itemsize,
        block_size,
        checkpoint_blocks,
    )


def refuse_settings(config: EngineConfig) -> None:
    """Raise UnsupportedModelError for a setting that such a model cannot be served with."""
    if not config.groups:
        raise UnsupportedModelError("--no-groups", "of recurrent layers", f"{_WHAT}: a state has a block table of its own")
    if config.speculation != "off":
        why = "a guess that is not kept has changed the state"
        raise UnsupportedModelError("--speculation", config.speculation, f"off; others for {_WHAT}: {why}")
    if config.role != "both":
        raise UnsupportedModelError("--role", config.role, f"both; others for {_WHAT}: a running state stays with its engine")
    if config.kv_dtype != "auto":
        raise UnsupportedModelError("--kv-dtype", config.kv_dtype, f"auto; others for {_WHAT}: a state is not rounded")
