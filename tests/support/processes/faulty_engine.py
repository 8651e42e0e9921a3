"""An engine service whose device fails: `python -m tests.support.processes.faulty_engine`, and the flags of an engine.

Its model is the faulty one of odd_models.py. The variable FAULTY_ENGINE names where the device fails before the first step:
"loading" for want of memory while the model is loaded, "warming" so while its steps are made ready, "lost" for good then. With
"rank" it is a good engine, whose other ranks are those of faulty_rank.py.
"""

import dataclasses
import os
import sys

from kvkeeper.engine_service import server
from kvkeeper.engine_service.__main__ import main
from kvkeeper.engine_service.compute.model_runner import Runner, StepBounds
from kvkeeper.engine_service.compute.served_model import ServedModel
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.split import WHOLE, Split
from kvkeeper.engine_service.ranks import team
from tests.support.models.odd_models import faulty_model
from tests.support.processes import faulty_rank
from tests.support.stand_ins.device_faults import accelerator_error, out_of_memory

VARIABLE = "FAULTY_ENGINE"


def _load(config: EngineConfig, split: Split = WHOLE) -> ServedModel:
    where = os.environ.get(VARIABLE)

    def make_ready(runner: Runner, bounds: StepBounds) -> None:
        view = runner._kv_view  # type: ignore[attr-defined]  # as a forward pass has it
        assert view.numel()
        raise accelerator_error(719, "unspecified launch failure") if where == "lost" else out_of_memory()

    if where == "loading":
        raise out_of_memory()
    return dataclasses.replace(faulty_model(split), make_ready=make_ready if where else None)


if __name__ == "__main__":
    if os.environ.get(VARIABLE) == "rank":
        team.rank_process = faulty_rank  # type: ignore[assignment]
    else:
        server.load_served_model = _load  # type: ignore[assignment]
    sys.exit(main())
