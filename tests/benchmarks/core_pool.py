"""A pool of the core in this process, with one session that steps by columns: what figures of the core are measured on."""

import time
from collections.abc import Callable

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId
from tests.benchmarks.growing import Growing

_SESSION = SessionId("bench")


def microseconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


class CorePool:
    """Each step has completed before the next one. manager: is handed out for what is not a step."""

    def __init__(self, config: PoolConfig) -> None:
        self.manager = PoolManager(config)
        self._num_steps = 0

    def open(self, executor: Executor = Executor.ENGINE) -> None:
        """Opens the session, behind what has to come before it."""
        self.manager.sessions.open(_SESSION, executor)

    def create(self, sequence_id: int, tokens: np.ndarray) -> None:
        self.manager.creation.create(_SESSION, SequenceArgs(SequenceId(sequence_id), tokens))

    def step(self, **columns: np.ndarray) -> StepReply:
        return self.manager.steps.step(_SESSION, self.next_batch(**columns))

    def next_batch(self, **columns: np.ndarray) -> StepBatch:
        """The next step; what takes it is left to the caller."""
        self._num_steps += 1
        return StepBatch(self._num_steps, self._num_steps - 1, **columns)

    def take(self, batch: StepBatch) -> StepReply:
        return self.manager.steps.step(_SESSION, batch)

    def begin(self, load: Growing) -> None:
        """Creates and starts the sequences of a load."""
        for sequence_id, prompt in zip(load.ids.tolist(), load.prompts(), strict=True):
            self.create(sequence_id, prompt)
        self.step(**load.start_columns())

    def start(self, sequence_id: int, num_tokens: int, max_hit: int | None = None) -> StepReply:
        """A step that starts one sequence, with all that it hits."""
        most = np.array([num_tokens], np.int32)
        hit = most if max_hit is None else np.array([max_hit], np.int32)
        return self.step(start_ids=np.array([sequence_id]), start_max_new=most, start_max_hit=hit)

    def commit(self, sequence_id: int, num_tokens: int, **columns: np.ndarray) -> StepReply:
        """A step that commits a whole prompt."""
        length, none = np.array([num_tokens], np.int32), np.zeros(1, np.int32)
        return self.step(commit_ids=np.array([sequence_id]), commit_lens=length, commit_num_new=none, **columns)

    def publish(self) -> None:
        self.manager.maintenance.publish_pending()
