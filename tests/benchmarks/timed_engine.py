"""`python -m tests.benchmarks.timed_engine MS FLAGS`: the engine on a device that does nothing and takes MS for a step.

It is launched and read as a device is: the next step may be launched behind the one that runs, and a thread waits for its end.
Prompts take it as long as an H200 takes for a model of Llama-3.2-1B's shape, and the host as long to launch them.
"""

import sys
import time

import numpy as np

from kvkeeper.engine_service.__main__ import main
from kvkeeper.engine_service.compute.sampler import SampledTokens
from kvkeeper.engine_service.compute.step_compute import Computed, StepRows
from kvkeeper.engine_service.loop import engine
from kvkeeper.engine_service.scheduler.plan import Work

_NEXT_TOKEN = 7
_LAUNCH_S = 120e-6  # of the host, for a replay of a graph on an H200
_PROMPT_LAUNCH_S = 6.5e-3  # kernel by kernel
PROMPT_TOKEN_S = 4.5e-6


class _Launched:
    def __init__(self, end: float, num_tokens: int) -> None:
        self._end, self._num_tokens = end, num_tokens

    def read(self) -> Computed:
        time.sleep(max(self._end - time.perf_counter(), 0))
        return Computed(SampledTokens(np.full(self._num_tokens, _NEXT_TOKEN, np.int64), ()))


class _TimedCompute:
    """In place of StepCompute."""

    is_immediate = False

    def __init__(self, runner: object) -> None:
        self._free_at = 0.0

    def launch(self, work: Work, how: StepRows, moves: object) -> _Launched:
        began, num_prompt = time.perf_counter(), work.num_prompt_tokens
        while time.perf_counter() - began < (_PROMPT_LAUNCH_S if num_prompt else _LAUNCH_S):
            pass
        seconds = _SECONDS + PROMPT_TOKEN_S * num_prompt
        self._free_at = max(self._free_at, time.perf_counter()) + (seconds if work.batch is not None else 0)
        return _Launched(self._free_at, len(how.sampled))


if __name__ == "__main__":
    _SECONDS = float(sys.argv[1]) / 1e3
    engine.StepCompute = _TimedCompute  # type: ignore[misc, assignment]
    sys.exit(main(["--model", "hash-toy", *sys.argv[2:]]))
