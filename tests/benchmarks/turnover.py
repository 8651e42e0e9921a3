"""The workload of the step benchmarks in which requests come and go: each step the oldest sequences end and as many start."""

from dataclasses import dataclass

import numpy as np

from tests.benchmarks.growing import BLOCK_SIZE

_PROMPT_LEN, _MOST_OUTPUT = 200, 512


@dataclass(frozen=True, slots=True)
class Turnover:
    """num_sequences run at any time, ids in the order of their arrival; num_ends of them end in each step.

    A step commits what the one before it computed, prompts included, releases the oldest sequences and reserves one slot more
    for each of the others. Its starts are sequences that were created just before.
    """

    num_sequences: int
    num_ends: int

    @property
    def ids(self) -> np.ndarray:
        """Of the sequences that the first step starts."""
        return self._ids(0)

    @property
    def max_sequences(self) -> int:
        return self.num_sequences + 2 * self.num_ends

    def fills(self, step_idx: int) -> bool:
        """Each step some sequences fill a block."""
        return True

    def num_blocks(self, num_steps: int) -> int:
        """Blocks for so many steps, with those that stay cached."""
        num_all = self.num_sequences + num_steps * self.num_ends
        return num_all * (_PROMPT_LEN // BLOCK_SIZE + 3) + self.num_sequences * (num_steps // BLOCK_SIZE + 2)

    def prompts(self) -> list[np.ndarray]:
        """Of the sequences that the first step starts, their lengths staggered across blocks."""
        return [
            _prompt(sequence_id, length) for sequence_id, length in zip(self.ids.tolist(), self._lens(0).tolist(), strict=True)
        ]

    def start_columns(self) -> dict[str, np.ndarray]:
        most = np.full(self.num_sequences, _MOST_OUTPUT, np.int32)
        return {"start_ids": self.ids, "start_max_new": most, "start_max_hit": most}

    def created(self, step_idx: int) -> list[tuple[int, np.ndarray]]:
        """Ids and prompts of the sequences that the step_idx-th step starts."""
        return [(sequence_id, _prompt(sequence_id, _PROMPT_LEN)) for sequence_id in self._started(step_idx).tolist()]

    def grow_columns(self, step_idx: int) -> dict[str, np.ndarray]:
        """The step_idx-th step (from 0)."""
        ids, lens, stay = self._ids(step_idx), self._lens(step_idx), slice(self.num_ends, None)
        reserved = lens[stay] + np.int32(1)
        return {
            "commit_ids": ids,
            "commit_lens": lens,
            "commit_num_new": np.ones(len(ids), np.int32),
            "commit_tokens": np.random.default_rng(step_idx).integers(0, 32000, len(ids)).astype(np.int32),
            "release_ids": ids[: self.num_ends],
            "start_ids": self._started(step_idx),
            "start_max_new": np.full(self.num_ends, _MOST_OUTPUT, np.int32),
            "start_max_hit": np.full(self.num_ends, _PROMPT_LEN - 1, np.int32),
            "start_may_wait": np.ones(self.num_ends, np.int32),
            "reserve_ids": ids[stay],
            "reserve_min": reserved,
            "reserve_max": reserved,
        }

    def _ids(self, step_idx: int) -> np.ndarray:
        """Of the sequences whose tokens a step commits."""
        return np.arange(1, self.num_sequences + 1, dtype=np.int64) + step_idx * self.num_ends

    def _started(self, step_idx: int) -> np.ndarray:
        return self._ids(step_idx + 1)[self.num_sequences - self.num_ends :]

    def _lens(self, step_idx: int) -> np.ndarray:
        """Tokens whose K and V are there by then."""
        ids = self._ids(step_idx)
        is_first = ids <= self.num_sequences
        started_in = np.where(is_first, -1, (ids - self.num_sequences - 1) // self.num_ends)
        return (_PROMPT_LEN + np.where(is_first, ids % BLOCK_SIZE, 0) + step_idx - started_in - 1).astype(np.int32)


def _prompt(sequence_id: int, length: int) -> np.ndarray:
    return np.random.default_rng(sequence_id).integers(0, 32000, length).astype(np.int32)
