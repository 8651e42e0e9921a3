"""A rank whose device fails in a step: `python -m tests.support.processes.faulty_rank DESCRIPTOR PARENT FOLDER`.

It is the rank that the engine starts, but for its model, which is the faulty one of odd_models.py.
"""

import torch

from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.hash_toy import HashToyConfig
from kvkeeper.engine_service.model.split import Split
from kvkeeper.engine_service.ranks import rank_model
from kvkeeper.engine_service.ranks.rank_model import OnArena
from kvkeeper.engine_service.ranks.rank_process import PARTED, main
from tests.support.models.odd_models import FaultyRunner

__all__ = ["PARTED"]  # which the engine looks for


def _load(config: EngineConfig, split: Split) -> OnArena:
    toy = HashToyConfig()

    def on_arena(memory: torch.Tensor, block_size: int, has_groups: bool) -> FaultyRunner:
        layout = toy.kv_layout(block_size)
        return FaultyRunner(toy, layout.view(memory), layout, split)

    return on_arena


if __name__ == "__main__":
    rank_model.load_rank_model = _load
    main()
