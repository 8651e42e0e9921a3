"""`python -m tests.benchmarks.recording_engine FILE FLAGS`: the engine service, writing down what it computes.

One line per forward pass: its tokens, and how many of them have logits.
"""

import sys

import torch

from kvkeeper.engine_service.__main__ import main
from kvkeeper.engine_service.compute.model_runner import ModelRunner
from kvkeeper.engine_service.values.batch import Batch


def _record(path: str) -> None:
    forward = ModelRunner.forward
    file = open(path, "w", buffering=1)  # noqa: SIM115  # as long as the process

    def recording(runner: ModelRunner, batch: Batch) -> torch.Tensor:
        file.write(f"{len(batch.token_ids)} {len(batch.logit_rows)}\n")
        return forward(runner, batch)

    ModelRunner.forward = recording  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    _record(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
