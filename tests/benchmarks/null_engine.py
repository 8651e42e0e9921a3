"""`python null_engine.py FLAGS`: the engine service with a model that computes nothing, to time all that surrounds a model.

Its logits are the same for every row, and nothing is written to the pool. It needs nothing but the installed package, so that
the Python of another checkout can run it, too.
"""

import sys
from collections.abc import Sequence
from functools import cache

import torch

from kvkeeper.engine_service.__main__ import main
from kvkeeper.engine_service.model.hash_toy import HashToyRunner
from kvkeeper.engine_service.values.batch import Batch

_NEXT_TOKEN = 7


@cache
def _row(vocab_size: int) -> torch.Tensor:
    """[1, vocab_size]: filling all rows in each step would cost more than what is timed."""
    logits = torch.zeros(1, vocab_size)
    logits[:, _NEXT_TOKEN] = 1.0
    return logits


def _forward(runner: HashToyRunner, batch: Batch) -> torch.Tensor:
    return _row(runner.vocab_size).expand(len(batch.logit_rows), -1)


def _copy_blocks(runner: HashToyRunner, pairs: Sequence[tuple[int, int]]) -> None:
    """Nothing is there to be copied."""


if __name__ == "__main__":
    HashToyRunner.forward = _forward  # type: ignore[method-assign, assignment]
    HashToyRunner.copy_blocks = _copy_blocks  # type: ignore[method-assign, assignment]
    sys.exit(main(["--model", "hash-toy", *sys.argv[1:]]))
