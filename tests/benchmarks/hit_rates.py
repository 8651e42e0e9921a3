"""`python -m tests.benchmarks.hit_rates OUT.png`: draws what a trace hits by capacity, beside lru and the optimum.

Replays against the policies alone, without a pool.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kvkeeper.cache_service.replay import replay_optimum
from kvkeeper.cli.benchmark.bench import add_trace_flags, checked_policies, read_trace, reported
from kvkeeper.cli.benchmark.traces import Requests
from tests.benchmarks import plot
from tests.support.reference.policy_replay import replay_policy

_PLOTTED = 14  # capacities


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.hit_rates", description=__doc__)
    parser.add_argument("plot", type=Path, metavar="OUT.png", help="picture to write")
    add_trace_flags(parser)
    parser.add_argument("--policy", action="append", metavar="P", help="eviction policy, may be repeated, or all (adaptive)")
    return reported(_run)(parser.parse_args(argv))


def _run(args: argparse.Namespace) -> int:
    name, requests = read_trace(args)
    found = curves(checked_policies(args.policy or ["adaptive"]), requests)
    plot.draw(found, f"Prefix hit rate by capacity ({Path(name).name})", args.plot)
    return 0


def curves(policies: Sequence[str], requests: Requests) -> plot.Curves:
    """Hit rates at capacities from the longest request to all of the trace; replayed against the policies alone."""
    longest, distinct = max(map(len, requests)), len(set().union(*requests))
    sizes = sorted({round(size) for size in np.geomspace(longest, max(distinct, longest), _PLOTTED).tolist()})
    found: plot.Curves = {name: [] for name in dict.fromkeys([*policies, "lru", plot.OPTIMUM])}
    for policy, num_blocks in tqdm([(p, n) for p in found for n in sizes], "curves", leave=False, disable=None):
        optimal = policy == plot.OPTIMUM
        done = replay_optimum(requests, num_blocks) if optimal else replay_policy(requests, num_blocks, policy)
        found[policy].append((num_blocks, round(done.hit_rate, 4)))
    return found


if __name__ == "__main__":
    sys.exit(main())
