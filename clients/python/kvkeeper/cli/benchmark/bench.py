"""`kvkeeper bench trace`: what a trace of requests hits in the cache, by policy and size, and how long steps take.

Replays against the core in this process, or with --live against a running cache service, whose policy and size are its own.
Imports the core only when it runs.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from kvkeeper.cli.benchmark import live, traces
from kvkeeper.cli.benchmark.traces import Requests
from kvkeeper.cli.console.addresses import add_cache_flag
from kvkeeper.cli.console.problems import EXIT_OK, EXIT_USAGE, UsageFailure

_BLOCKS = 5000
_BLOCK_SIZE = 16
_ALL = "all"


def add_flags(bench: argparse.ArgumentParser) -> None:
    names = bench.add_subparsers(title="benchmarks", metavar="NAME", required=True)
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
    parser.add_argument("--live", action="store_true", help="replay against the cache service at --cache, not the core alone")
    add_cache_flag(parser)


Run = Callable[[argparse.Namespace], int]


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="Mooncake-format trace; without it: a generated one")
    parser.add_argument("--seed", type=least(0), default=0, help="of the generated trace (default: %(default)s)")


def read_trace(args: argparse.Namespace) -> tuple[str, Requests]:
    """Its name and its requests. Raises UsageFailure."""
    if args.file:
        return str(args.file), traces.read(args.file)
    return f"generated, seed {args.seed}", traces.generate(args.seed)


def described(name: str, requests: Requests) -> dict[str, Any]:
    return {
        "trace": name,
        "requests": len(requests),
        "blocks_asked": sum(map(len, requests)),
        "distinct_blocks": len(set().union(*requests)),
    }


def reported(run: Run) -> Run:
    """run, with a UsageFailure reported in one line."""

    def checked(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except UsageFailure as failure:
            print(f"kvkeeper: {failure}", file=sys.stderr)
            return EXIT_USAGE

    return checked


def least(least: int) -> Callable[[str], int]:
    """A type of argument: a whole number of at least this."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
        if not least <= number <= 2**31 - 1:
            raise argparse.ArgumentTypeError(f"{number} is not {least} to 2^31 - 1")
        return number

    return parse


def _run(args: argparse.Namespace) -> int:
    if args.live and (args.policy or args.blocks):
        raise UsageFailure("a running service has its policy and size: --policy and --blocks are not for --live")
    policies = checked_policies(args.policy or ["adaptive"])
    name, requests = read_trace(args)
    report = {**described(name, requests), "block_size": args.block_size}
    if args.live:
        report["results"] = [_live(args, requests)]
    else:
        report["results"] = _core(policies, args.blocks or [_BLOCKS], requests, args.block_size)
    print(json.dumps(report))
    return EXIT_OK


run = reported(_run)


def checked_policies(asked: Sequence[str]) -> list[str]:
    """Raises UsageFailure."""
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


def _bar(requests: Requests, name: str) -> "tqdm[list[int]]":
    """A bar, which is shown on a terminal only."""
    return tqdm(requests, name, unit=" requests", leave=False, disable=None)
