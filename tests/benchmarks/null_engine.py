"""`python null_engine.py FLAGS`: the engine service with a model that computes nothing, to time all that surrounds a model.

Its logits are the same for every row, and nothing is written to the pool. It needs nothing but the installed package, so that
the Python of another checkout can run it, too.
"""

import sys
from collections.abc import Sequence

import torch

from kvkeeper.engine_service.__main__ import main
from kvkeeper.engine_service.model.hash_toy import HashToyRunner
from kvkeeper.engine_service.values.batch import Batch

_NEXT_TOKEN = 7


def _forward(runner: HashToyRunner, batch: Batch) -> torch.Tensor:
    logits = torch.zeros(len(batch.logit_rows), runner.vocab_size)
    logits[:, _NEXT_TOKEN] = 1.0
    return logits


def _copy_blocks(runner: HashToyRunner, pairs: Sequence[tuple[int, int]]) -> None:
    """Nothing is there to be copied."""


if __name__ == "__main__":
    HashToyRunner.forward = _forward  # type: ignore[method-assign, assignment]
    HashToyRunner.copy_blocks = _copy_blocks  # type: ignore[method-assign, assignment]
    sys.exit(main(["--model", "hash-toy", *sys.argv[1:]]))
