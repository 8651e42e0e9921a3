"""The workload of the step benchmarks: sequences that grow by one token a step, their lengths staggered across blocks."""

from dataclasses import dataclass

import numpy as np

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Growing:
    """num_sequences prompts; lens [num_sequences] covers every offset within a block, unless all are at the same one."""

    num_sequences: int
    are_staggered: bool = True

    @property
    def ids(self) -> np.ndarray:
        return np.arange(1, self.num_sequences + 1, dtype=np.int64)

    @property
    def lens(self) -> np.ndarray:
        offsets = np.arange(self.num_sequences) % BLOCK_SIZE if self.are_staggered else np.zeros(self.num_sequences)
        return (BLOCK_SIZE + 1 + offsets).astype(np.int32)

    def fills(self, step_idx: int) -> bool:
        """Whether all sequences fill a block in this step; where they are staggered, some do in each."""
        return self.are_staggered or int(self.lens[0] + step_idx) % BLOCK_SIZE == 0

    def created(self, step_idx: int) -> list[tuple[int, np.ndarray]]:
        """Ids and prompts of the sequences that a step starts: none after the first."""
        return []

    @property
    def max_sequences(self) -> int:
        return self.num_sequences

    def num_blocks(self, num_steps: int) -> int:
        """Blocks for so many steps of all sequences, with room to spare."""
        return self.num_sequences * (4 + num_steps // BLOCK_SIZE) + 16

    def prompts(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.integers(0, 32000, length).astype(np.int32) for length in self.lens]

    def start_columns(self) -> dict[str, np.ndarray]:
        most = np.full(self.num_sequences, 512, np.int32)
        return {"start_ids": self.ids, "start_max_new": most, "start_max_hit": most}

    def grow_columns(self, step_idx: int) -> dict[str, np.ndarray]:
        """The step_idx-th step (from 0) commits what the one before computed and reserves one slot more."""
        lens = self.lens + np.int32(step_idx)
        tokens = np.random.default_rng(step_idx).integers(0, 32000, self.num_sequences).astype(np.int32)
        return {
            "commit_ids": self.ids,
            "commit_lens": lens,
            "commit_num_new": np.ones(self.num_sequences, np.int32),
            "commit_tokens": tokens,
            "reserve_ids": self.ids,
            "reserve_min": lens + np.int32(1),
            "reserve_max": lens + np.int32(1),
        }
