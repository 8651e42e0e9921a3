"""The second of two ranks that do nothing but add up: `python -m tests.benchmarks.summing_rank PATH`."""

import sys
from pathlib import Path

import torch

from kvkeeper.engine_service.ranks.meeting import Meeting

SHAPES = (1, 16)  # rows of what is added up
HIDDEN = 512
NUM_ROUNDS = 200


def sum_all(meeting: Meeting, part: torch.Tensor) -> None:
    """So many sums, one after the other."""
    for _ in range(NUM_ROUNDS):
        meeting.add_up(part.fill_(1))


def main() -> None:
    torch.set_num_threads(1)
    meeting = Meeting(2)
    meeting.join(Path(sys.argv[1]), 1, torch.device("cpu"), 60.0)
    for rows in SHAPES:
        for _ in range(2):
            sum_all(meeting, torch.ones(rows, HIDDEN))


if __name__ == "__main__":
    main()
