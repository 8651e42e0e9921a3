"""Replays a trace at several capacities: `python -m tests.benchmarks.trace [FILE] [--policy P ...] [--blocks N ...]`.

FILE is a Mooncake-format trace; without it a generated workload is replayed. Prints one JSON object a line for each policy
and capacity; LRU and the offline optimum stand beside the policies asked for. `--core` replays against the whole core
instead of the policy alone.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cache_service.eviction import POLICY_NAMES
from tests.benchmarks.replay import Replayed, Requests, read_trace, replay_core, replay_optimum, replay_policy
from tests.support.workloads import WORKLOADS

OPTIMUM = "optimum"
_GENERATED = {"multi_turn": (200, 800), "zipf": (200, 800), "scan": (200, 800)}

Replay = Callable[[Iterable[list[int]], int, str], Replayed]


def figures() -> Iterator[dict[str, object]]:
    """A few generated workloads, against the core."""
    for name, capacities in _GENERATED.items():
        requests = WORKLOADS[name](0)
        for num_blocks in capacities:
            for policy in ("lru", "adaptive"):
                yield {"workload": name, **_figure(replay_core(requests, num_blocks, policy), num_blocks, policy)}


def main() -> None:
    args = _arguments()
    requests = read_trace(args.file) if args.file else WORKLOADS[args.workload](args.seed)
    longest = max(map(len, requests))
    capacities = sorted(num_blocks for num_blocks in set(args.blocks) if num_blocks >= longest)
    for num_blocks in sorted(set(args.blocks) - set(capacities)):
        print(f"{num_blocks} blocks do not hold the longest request, of {longest}", flush=True)
    rates: dict[str, list[float]] = {}
    for policy in dict.fromkeys(["lru", *args.policy, OPTIMUM]):
        for num_blocks in capacities:
            replayed = _replay(requests, num_blocks, policy, core=args.core)
            rates.setdefault(policy, []).append(replayed.hit_rate)
            print(json.dumps(_figure(replayed, num_blocks, policy)), flush=True)
    if args.plot:
        _plot(args.plot, capacities, rates)


def _replay(requests: Requests, num_blocks: int, policy: str, *, core: bool) -> Replayed:
    if policy == OPTIMUM:
        return replay_optimum(requests, num_blocks)
    replay: Replay = replay_core if core else replay_policy
    return replay(tqdm(requests, f"{policy}, {num_blocks} blocks", unit=" requests", leave=False), num_blocks, policy)


def _figure(replayed: Replayed, num_blocks: int, policy: str) -> dict[str, object]:
    return {
        "policy": policy,
        "blocks": num_blocks,
        "hit_rate": round(replayed.hit_rate, 4),
        "evictions": replayed.num_evicted,
        "requests": replayed.num_requests,
        "us_per_request": round(1e6 * replayed.seconds / replayed.num_requests, 1),
    }


def _plot(path: Path, capacities: list[int], rates: dict[str, list[float]]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for policy, row in rates.items():
        axes.plot(capacities, row, "--" if policy == OPTIMUM else "-", marker=".", label=policy)
    axes.set(xscale="log", xlabel="capacity in blocks", ylabel="hit rate", ylim=0)
    axes.legend()
    figure.savefig(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.trace", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE")
    parser.add_argument("--policy", nargs="+", default=["adaptive"], choices=POLICY_NAMES)
    parser.add_argument("--blocks", nargs="+", type=int, default=[int(n) for n in np.geomspace(500, 50_000, 20).round()])
    parser.add_argument("--workload", default="multi_turn", choices=WORKLOADS, help="what to generate without a FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", action="store_true", help="replay against the whole core")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw hit rate by capacity; needs matplotlib")
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which kvkeeper does not install: pip install matplotlib")
    return args


if __name__ == "__main__":
    main()
