"""The draft model that --draft-model names, as the engine loads it."""

from pathlib import Path

import numpy as np

from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.server import _load_proposer
from kvkeeper.engine_service.speculation.draft_model import DraftModel
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model


def test_one_with_windows_in_some_layers_guesses_what_it_would_say(tmp_path: Path) -> None:
    """Its batches have one table for all layers, so layers in groups would write into each other's blocks."""
    mixed = tiny_model("gemma2")
    folder = str(build_model_folder(tmp_path, mixed))
    config = EngineConfig(model=folder, speculation="draft-model", draft_model=folder, cpu_kernels="torch")
    served = load_served_model(config)
    assert served.groups and served.whole is not None, "windows in some layers"
    proposer = _load_proposer(config, served)
    assert proposer is not None
    histories = {row: np.array(random_tokens(40, row), np.int32) for row in range(2)}
    most = dict.fromkeys(histories, 8)
    found, expected = proposer.propose(histories, most), DraftModel(served.whole, 128).propose(histories, most)
    assert {row: guesses.tolist() for row, guesses in found.items()} == {
        row: guesses.tolist() for row, guesses in expected.items()
    }
