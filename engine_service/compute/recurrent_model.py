"""A served model some of whose layers keep a state instead of tokens: its groups of layers, and what it is refused.

What is refused would need a state that is not there: a state can be neither taken back by a token, nor split, nor rounded.
"""

from ..config import EngineConfig
from ..model.checkpoint.errors import UnsupportedModelError
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.layer_groups import LayerGroup, group_states

_WHAT = "models without recurrent layers"


def has_states(config: ModelConfig) -> bool:
    """Whether any layer keeps a state."""
    return config.delta is not None and bool(config.delta.layers)


def state_groups(model: Decoder, block_size: int, checkpoint_blocks: int) -> tuple[LayerGroup, ...]:
    """The groups of such a model. Raises UnsupportedModelError where a block is too small for a state."""
    config = model.config
    assert config.delta is not None, "asked of models with states"
    return group_states(
        config.delta.layers,
        config.num_layers,
        config.delta.shape.state_bytes(model.dtype.itemsize),
        2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize,
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
