"""`python -m tests.benchmarks.tier_hits`: what a trace hits on the device, in host memory and on the disk, and what moves.

Replays in this process against the core with the device alone, then with each further tier, and prints one JSON object. Hits
are those of tiers that are fast enough; what a real disk does to the time to the first token is for a running service.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cli.benchmark.bench import add_trace_flags, described, least, read_trace, reported
from kvkeeper.cli.console.problems import EXIT_OK, UsageFailure
from kvkeeper.common.service.sizes import parse_size, size
from tests.benchmarks import plot
from tests.benchmarks.tier_replay import TierSizes, TierSums, replay_tiers
from tests.support.reference.policy_replay import replay_policy

_BLOCKS, _HOST_BLOCKS, _DISK_BLOCKS = 2000, 5000, 50_000


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.tier_hits",
        description="Replays a trace against a pool with the device alone, with a host tier, and with a disk behind it.",
        allow_abbrev=False,
    )
    add_trace_flags(parser)
    parser.add_argument("--policy", default="adaptive", metavar="P", help="eviction policy of the device (%(default)s)")
    parser.add_argument("--blocks", type=least(1), default=_BLOCKS, metavar="N", help="of the device (%(default)s)")
    parser.add_argument("--host-blocks", type=least(1), default=_HOST_BLOCKS, metavar="N", help="(%(default)s)")
    parser.add_argument("--disk-blocks", type=least(1), default=_DISK_BLOCKS, metavar="N", help="(%(default)s)")
    parser.add_argument("--disk-admit", choices=("all", "second-use"), default="all", help="what is stored (%(default)s)")
    parser.add_argument("--block-memory", type=_memory, metavar="SIZE", help="of one block, such as 2MiB: tells bytes too")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the hits by tier")
    return reported(_run)(parser.parse_args(argv))


def _run(args: argparse.Namespace) -> int:
    if args.policy not in POLICY_NAMES:
        raise UsageFailure(f"--policy: one of {', '.join(POLICY_NAMES)}; not {args.policy}")
    name, requests = read_trace(args)
    longest = max(map(len, requests))
    if args.blocks <= longest:
        raise UsageFailure(f"--blocks {args.blocks} do not hold the longest request of the trace, of {longest}, and one more")
    report = described(name, requests)
    infinite = replay_policy(requests, report["distinct_blocks"], "lru").hit_rate
    sizes = {
        "device": TierSizes(args.blocks),
        "device, host": TierSizes(args.blocks, args.host_blocks),
        "device, host, disk": TierSizes(args.blocks, args.host_blocks, args.disk_blocks),
    }
    second = args.disk_admit == "second-use"
    rows = []
    for tiers, each in sizes.items():
        bar = tqdm(requests, tiers, unit=" requests", leave=False, disable=None)
        sums = replay_tiers(bar, each, args.policy, on_second_use=second)
        rows.append({"tiers": tiers, **_row(each, sums, infinite, args.block_memory)})
    if args.plot is not None:
        shares = {row["tiers"]: row["hit_rates"] for row in rows}
        plot.draw_tiers(shares, infinite, f"Hits by tier ({Path(name).name})", args.plot)
    print(json.dumps({**report, "infinite_hit_rate": round(infinite, 4), "results": rows}))
    return EXIT_OK


def _row(sizes: TierSizes, sums: TierSums, infinite: float, block_bytes: int | None) -> dict[str, Any]:
    asked = max(sums.num_blocks, 1)
    hits = {"device": sums.num_device_hits, "host": sums.num_host_hits, "disk": sums.num_disk_hits}
    moved = {
        "device_to_host": sums.num_to_host,
        "host_to_device": sums.num_from_host,
        "host_to_disk": sums.num_to_disk,
        "disk_to_host": sums.num_disk_hits,
    }
    row: dict[str, Any] = {
        "blocks": {"device": sizes.device, "host": sizes.host, "disk": sizes.disk},
        "hit_rate": round(sums.hit_rate, 4),
        "of_infinite": round(sums.hit_rate / infinite, 4) if infinite else None,
        "hit_rates": {tier: round(count / asked, 4) for tier, count in hits.items()},
        "moved_blocks": moved,
    }
    if block_bytes is not None:
        row["moved_memory"] = {way: size(count * block_bytes) for way, count in moved.items()}
    return row


def _memory(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
