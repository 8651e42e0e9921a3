"""What the systems are asked: so many streams at once, greedy, of random token ids that no cache has seen before."""

from dataclasses import dataclass

import numpy as np

from tests.benchmarks.llama import random_prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """num_shared: tokens in common of all prompts, which a request before has computed; num_own follow."""

    name: str
    num_streams: int
    num_shared: int
    num_own: int
    num_new: int


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("1", 1, 0, 256, 128),
        Workload("16", 16, 0, 256, 128),
        Workload("64", 64, 0, 256, 64),
        Workload("shared", 16, 2000, 64, 64),
    )
}


@dataclass(frozen=True, slots=True)
class Job:
    """What a system is told: num_new tokens behind each prompt, all at once."""

    prompts: list[list[int]]
    num_new: int


def jobs(workload: Workload, round_idx: int) -> list[Job]:
    """The last one is measured. Those of another round share no beginning with them."""
    rng = np.random.default_rng((round_idx, workload.num_streams, workload.num_shared))
    shared = random_prompt(rng, workload.num_shared).tolist()
    prompts = [shared + random_prompt(rng, workload.num_own).tolist() for _ in range(workload.num_streams)]
    return [*([Job([shared], 1)] if shared else []), Job(prompts, workload.num_new)]
