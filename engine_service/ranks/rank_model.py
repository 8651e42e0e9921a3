"""The model of one rank, put on the arena of that rank: what another process of the engine needs of ServedModel alone."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from ..compute.cpu_kernels import prepare_kernels
from ..compute.model_runner import ModelRunner, Runner, make_kv_layout
from ..compute.stored_model import format_for, has_states, kv_groups, prepare_for, state_groups, stored_layout
from ..config import HASH_TOY, EngineConfig, get_dtype
from ..model.dtype_name import DtypeChoice
from ..model.hash_toy import HashToyConfig, HashToyRunner
from ..model.loader import load_model
from ..model.split import Split

# (bytes of the arena, block size, whether layers are in groups) -> the model on it
OnArena = Callable[[torch.Tensor, int, bool], Runner]


def load_rank_model(config: EngineConfig, split: Split) -> OnArena:
    """Load a rank's part of --model. Raises ModelError."""
    if config.model == HASH_TOY:
        toy = HashToyConfig()
        return lambda memory, block_size, _: HashToyRunner(
            toy, toy.kv_layout(block_size).view(memory), toy.kv_layout(block_size), split
        )
    decoder, _ = load_model(
        Path(config.model), device=config.device, dtype=cast(DtypeChoice, get_dtype(config)), progress=False, split=split
    )
    prepare_kernels(decoder.dtype, decoder.device)
    if (kv_format := format_for(config.kv_dtype, decoder.dtype)) is not None:
        prepare_for(decoder, kv_format)

    def on_arena(memory: torch.Tensor, block_size: int, has_groups: bool) -> Runner:
        if kv_format is not None:
            stored, tails = stored_layout(decoder, kv_format, block_size, config.kv_tail_tokens if has_groups else 0)
            return ModelRunner(decoder, stored.view(memory), stored, tails)
        if has_states(decoder.config):
            groups = state_groups(decoder, block_size, max(config.checkpoint_tokens // block_size, 1))
        else:
            groups = kv_groups(decoder.config) if has_groups else ()
        layout = make_kv_layout(decoder.config, decoder.dtype, block_size, groups)
        return ModelRunner(decoder, layout.view(memory), layout, groups)

    return on_arena
