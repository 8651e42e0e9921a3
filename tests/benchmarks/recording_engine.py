"""`python -m tests.benchmarks.recording_engine FILE FLAGS`: the engine service, writing down what it computes.

One line per forward pass: its tokens, and how many of them have logits.
"""

import sys
from typing import Any

from kvkeeper.engine_service.__main__ import main
from kvkeeper.engine_service.compute.device.upload import Staged
from kvkeeper.engine_service.compute.model_runner import ModelRunner
from kvkeeper.engine_service.compute.sampler import StepLogits
from kvkeeper.engine_service.values.batch import Batch


def _record(path: str) -> None:
    stage = ModelRunner.stage
    file = open(path, "w", buffering=1)  # noqa: SIM115  # as long as the process

    def recording(runner: ModelRunner, batch: Batch, *how: Any) -> Staged[StepLogits]:
        file.write(f"{len(batch.token_ids)} {len(batch.logit_rows)}\n")
        return stage(runner, batch, *how)

    ModelRunner.stage = recording  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    _record(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
