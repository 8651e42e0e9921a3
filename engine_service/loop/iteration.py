"""Iteration: what one turn of the loop computed, for which requests, and what it cost; a value to print and log.

Made of what the step had at hand, so that keeping the last one costs nothing; the readable form is made on demand.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..scheduler.plan import Task, Work


@dataclass(frozen=True, slots=True)
class Iteration:
    """One turn of the loop. seconds: of the whole turn; cache_wait_seconds: the part that waited for the cache service."""

    step_id: int
    work: Work
    num_waiting: int
    seconds: float
    cache_wait_seconds: float

    def prefills(self) -> list[Task]:
        """The tasks that computed prompt tokens."""
        return [task for task in self._tasks() if task.num_context < len(task.sequence.request.prompt)]

    def decodes(self) -> list[Task]:
        """The tasks that computed one new token, or more where they resumed or speculated."""
        return [task for task in self._tasks() if task.num_context >= len(task.sequence.request.prompt)]

    def started(self) -> list[Task]:
        """The prefills and decodes of sequences that were waiting before."""
        chosen = set(self.work.changes.started)
        return [task for task in self._tasks() if task.sequence in chosen]

    def preempted(self) -> list[Task]:
        """The sequences that gave their blocks back so that others could go on, and that are computed again."""
        return [Task(sequence, 0, 0) for sequence in self.work.changes.preempted]

    def swapped_out(self) -> list[Task]:
        """The sequences that gave their blocks back while the host tier keeps their K and V."""
        return list(self.work.changes.swapped_out)

    def swapped_in(self) -> list[Task]:
        """The sequences whose K and V come back from the host tier."""
        return list(self.work.changes.swapped_in)

    def __str__(self) -> str:
        prefills, decodes = self.prefills(), self.decodes()
        num_tokens, changes = self.work.num_tokens, self.work.changes
        lines = [
            f"step {self.step_id}: {num_tokens} tokens, {len(prefills)} prefills, {len(decodes)} decodes, "
            f"{len(changes.started)} started, {len(changes.preempted)} preempted, {len(changes.swapped_out)} swapped out, "
            f"{len(changes.swapped_in)} in, {self.num_waiting} waiting; "
            f"{self.seconds * 1e3:.2f} ms, {self.cache_wait_seconds * 1e3:.2f} ms of it for the cache service"
        ]
        lines += [f"  prefill {task}" for task in prefills]
        lines += [f"  decode {task}" for task in decodes]
        lines += [f"  preempted {task.name}" for task in self.preempted()]
        lines += [f"  swapped out {task.name} with {task.num_context} tokens" for task in changes.swapped_out]
        lines += [f"  swapped in {task.name} with {task.num_context} tokens" for task in changes.swapped_in]
        return "\n".join(lines)

    def _tasks(self) -> Iterator[Task]:
        columns = (self.work.num_context.tolist(), self.work.num_new.tolist())
        for sequence, num_context, num_query in zip(self.work.sequences, *columns, strict=True):
            yield Task(sequence, num_context, num_query)
