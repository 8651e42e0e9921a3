"""`kvkeeper bench trace`: what a trace of requests hits in the cache, by policy and size, and how long steps take.

Replays against the core in this process, or with --live against a running cache service, whose policy and size are its own.
Imports the core only when it runs.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from kvkeeper.cli.benchmark import live, plot, quality, tiers
from kvkeeper.cli.benchmark.arguments import add_trace_flags, described, least, read_trace, reported
from kvkeeper.cli.benchmark.traces import Requests
from kvkeeper.cli.console.addresses import add_cache_flag
from kvkeeper.cli.console.problems import EXIT_OK, UsageFailure

_BLOCKS = 5000
_BLOCK_SIZE = 16
_PLOTTED = 14  # capacities
_ALL = "all"


def add_parser(commands: Any, text: str) -> None:
    bench = commands.add_parser("bench", help=text, allow_abbrev=False)
    names = bench.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    tiers.add_parser(names)
    quality.add_parser(names)
    parser = names.add_parser(
        "trace",
        help="hit rate, evictions and time per step of a trace",
        description="Replays a trace in order, a request at a time, and prints one JSON object.",
        allow_abbrev=False,
    )
    add_trace_flags(parser)
    parser.add_argument("--policy", action="append", metavar="P", help="eviction policy, may be repeated, or all (adaptive)")
    parser.add_argument(
        "--blocks", action="append", type=least(1), metavar="N", help=f"size in blocks, may be repeated ({_BLOCKS})"
    )
    parser.add_argument(
        "--block-size", type=least(1), default=_BLOCK_SIZE, help="tokens that stand for a block (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw hit rate by capacity beside lru and the optimum")
    parser.add_argument("--live", action="store_true", help="replay against the cache service at --cache, not the core alone")
    add_cache_flag(parser)
    parser.set_defaults(run=reported(_run), asks="cache")


def _run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        plot.require()
    if args.live and (args.policy or args.blocks or args.plot):
        raise UsageFailure("a running service has its policy and size: --policy, --blocks and --plot are not for --live")
    policies = _policies(args.policy or ["adaptive"])
    name, requests = read_trace(args)
    report = {**described(name, requests), "block_size": args.block_size}
    if args.live:
        report["results"] = [_live(args, requests)]
    else:
        report["results"] = _core(policies, args.blocks or [_BLOCKS], requests, args.block_size)
    if args.plot is not None:
        curves = _curves(policies, requests)
        plot.draw(curves, f"Prefix hit rate by capacity ({Path(name).name})", args.plot)
        report["curves"] = curves
    print(json.dumps(report))
    return EXIT_OK


def _policies(asked: Sequence[str]) -> list[str]:
    from kvkeeper.cache_service.core.eviction import POLICY_NAMES

    if unknown := set(asked) - {*POLICY_NAMES, _ALL}:
        raise UsageFailure(f"--policy: one of {', '.join(POLICY_NAMES)}, {_ALL}; not {', '.join(sorted(unknown))}")
    return list(POLICY_NAMES) if _ALL in asked else list(dict.fromkeys(asked))


def _core(policies: Sequence[str], sizes: Sequence[int], requests: Requests, block_size: int) -> list[dict[str, object]]:
    from kvkeeper.cache_service.replay import replay_core, replay_optimum

    longest = max(map(len, requests))
    if min(sizes) < longest:
        raise UsageFailure(f"--blocks {min(sizes)} do not hold the longest request of the trace, of {longest}")
    best = {num_blocks: round(replay_optimum(requests, num_blocks).hit_rate, 4) for num_blocks in sizes}
    rows = []
    for policy in policies:
        for num_blocks in dict.fromkeys(sizes):
            bar = _bar(requests, f"{policy}, {num_blocks:,} blocks")
            replayed = replay_core(bar, num_blocks, policy, block_size=block_size)
            counts = replayed.num_blocks, replayed.num_hits, replayed.num_evicted
            figures = _figures(*counts, replayed.step_seconds)
            settings = {"target": "core", "policy": policy, "blocks": num_blocks}
            rows.append({**settings, **figures, "optimum_hit_rate": best[num_blocks]})
    return rows


def _live(args: argparse.Namespace, requests: Requests) -> dict[str, object]:
    bar = _bar(requests, args.cache)
    done = live.replay(args.cache, bar, max(map(len, requests)), args.block_size)
    figures = _figures(done.num_asked, done.num_hits, done.num_evicted, done.step_seconds)
    return {"target": args.cache, "policy": done.pool.eviction_policy, "blocks": done.pool.num_blocks - 1, **figures}


def _figures(num_asked: int, num_hits: int, num_evicted: int, step_seconds: npt.ArrayLike) -> dict[str, object]:
    micros = np.asarray(step_seconds) * 1e6
    p50, p99 = np.percentile(micros, (50, 99)).round(1).tolist()
    return {
        "hit_rate": round(num_hits / num_asked, 4),
        "hits": num_hits,
        "evictions": num_evicted,
        "steps": micros.size,
        "step_p50_us": p50,
        "step_p99_us": p99,
    }


def _curves(policies: Sequence[str], requests: Requests) -> plot.Curves:
    """Hit rates at capacities from the longest request to all of the trace; replayed against the policies alone."""
    from kvkeeper.cache_service.replay import replay_optimum, replay_policy

    longest, distinct = max(map(len, requests)), len(set().union(*requests))
    sizes = sorted({round(size) for size in np.geomspace(longest, max(distinct, longest), _PLOTTED).tolist()})
    curves: plot.Curves = {name: [] for name in dict.fromkeys([*policies, "lru", plot.OPTIMUM])}
    for policy, num_blocks in tqdm([(p, n) for p in curves for n in sizes], "curves", leave=False, disable=None):
        optimal = policy == plot.OPTIMUM
        done = replay_optimum(requests, num_blocks) if optimal else replay_policy(requests, num_blocks, policy)
        curves[policy].append((num_blocks, round(done.hit_rate, 4)))
    return curves


def _bar(requests: Requests, name: str) -> "tqdm[list[int]]":
    """On a terminal only."""
    return tqdm(requests, name, unit=" requests", leave=False, disable=None)
