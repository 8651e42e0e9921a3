"""Systems that take turns at a workload, A B A B, and the medians over the rounds."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from tests.benchmarks.peers.systems import Running
from tests.benchmarks.peers.workloads import Workload, jobs

PAUSE_S = 0.5  # threads that spin after their work have gone to sleep by then
_NUM_COMPARED = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """A workload by one system, once."""

    per_second: float
    first_p50_ms: float
    first_p99_ms: float
    between_p99_ms: float
    beginnings: list[list[int]]


def turn_of(answer: dict[str, Any]) -> Turn:
    """answer: of a process of systems.py. Tokens a second from the first request to the last token, prompts included."""
    times = answer["times"]
    first = np.array([of_stream[0] for of_stream in times]) * 1e3
    between = np.concatenate([np.diff(of_stream) for of_stream in times]) * 1e3
    return Turn(
        sum(map(len, answer["tokens"])) / max(of_stream[-1] for of_stream in times),
        float(np.percentile(first, 50)),
        float(np.percentile(first, 99)),
        float(np.percentile(between, 99)) if between.size else 0.0,
        [tokens[:_NUM_COMPARED] for tokens in answer["tokens"]],
    )


def take_turns(
    running: Sequence[Running], workload: Workload, num_rounds: int, tick: Callable[[], object]
) -> Iterator[dict[str, object]]:
    """A figure for each system. The first system is the one that the others are compared with. tick: after each turn."""
    taking = [each for each in running if each.system.shares_prefixes or not workload.num_shared]
    turns: list[list[Turn]] = [[] for _ in taking]
    for round_idx in range(num_rounds + 1):
        for each, found in zip(taking, turns, strict=True):
            time.sleep(PAUSE_S)
            *before, measured = jobs(workload, round_idx)
            for job in before:
                each.ask(job)
            turn = turn_of(each.ask(measured))
            if round_idx:  # the first warms up
                found.append(turn)
            tick()
    for each, found in zip(taking, turns, strict=True):
        yield {"system": each.system.name, "dtype": each.system.kind, "workload": workload.name, **figure(found, turns[0])}
    for each in running:
        if each not in taking:
            reason = f"{each.system.name} is not measured on a shared prefix: its sequences have nothing in common"
            yield {"system": each.system.name, "dtype": each.system.kind, "workload": workload.name, "skipped": reason}


def figure(found: Sequence[Turn], of_first: Sequence[Turn]) -> dict[str, object]:
    """Medians over the rounds, and how many times as fast the first system was in the same round."""
    ratios = [first.per_second / turn.per_second for first, turn in zip(of_first, found, strict=True)]
    pairs = [
        ours == theirs
        for first, turn in zip(of_first, found, strict=True)
        for ours, theirs in zip(first.beginnings, turn.beginnings, strict=True)
    ]
    return {
        "rounds": len(found),
        "per_second": round(median(turn.per_second for turn in found), 1),
        "first_token_p50_ms": round(median(turn.first_p50_ms for turn in found), 1),
        "first_token_p99_ms": round(median(turn.first_p99_ms for turn in found), 1),
        "between_tokens_p99_ms": round(median(turn.between_p99_ms for turn in found), 1),
        "first_system_times_this": round(median(ratios), 3),
        "same_beginnings": round(sum(pairs) / len(pairs), 2),  # of streams: rounding alone may part them
        "load": round(os.getloadavg()[0], 1),
    }
