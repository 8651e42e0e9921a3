"""`kvkeeper curve`: the hit rate that pools of other sizes would have had in the last hour."""

import argparse
from pathlib import Path
from typing import Any

from kvkeeper.cli.console.addresses import add_cache_flag, add_json_flag
from kvkeeper.cli.console.messages import as_json
from kvkeeper.cli.console.problems import EXIT_OK, EXIT_USAGE, UsageFailure, complain
from kvkeeper.cli.show.each_pool import print_pools, read_pools
from kvkeeper.cli.show.status import pool_line
from kvkeeper.common.service.extras import missing

_WIDTH = 50  # of a bar that stands for all tokens


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it, too; needs matplotlib")
    add_cache_flag(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """A bar for each size, of each pool. Raises KvkeeperError."""
    pools = read_pools(args.cache)
    try:
        if args.plot is not None:
            _draw(pools, args.plot)
    except UsageFailure as failure:
        complain(str(failure), reason="USAGE", is_json=args.json)
        return EXIT_USAGE
    print_pools(pools, show_curve, lambda pool: {"curve": [*map(as_json, pool.curve)]}, is_json=args.json)
    return EXIT_OK


def show_curve(pool: Any) -> str:
    """The sizes as bars, and beside them the rate that there was and the one of an endless cache."""
    bars = [(f"{point.size:g} x", num_blocks(pool, point.size), point.hit_rate) for point in pool.curve]
    bars += [("measured", num_blocks(pool, 1), pool.recent_hit_rate), ("endless", "", pool.reachable_hit_rate)]
    lines = [f"{name:>8}  {blocks:>11}  {rate:6.1%}  {'#' * round(_WIDTH * rate)}".rstrip() for name, blocks, rate in bars]
    first = f"{'size':>8}  {'blocks':>11}  hit rate of the last hour, if what was used last is kept"
    return "\n".join([f"pool: {pool_line(pool.pool)}", first, *lines])


def num_blocks(pool: Any, size: float) -> str:
    """Blocks of a pool of so many times the size, the host tier included."""
    info = pool.pool
    return f"{int(size * (max(info.num_blocks - 1, 0) + max(info.num_host_blocks - 1, 0))):,}"


def _draw(pools: Any, path: Path) -> None:
    """Writes a PNG. Raises UsageFailure when it cannot be."""
    if missing("matplotlib"):
        raise UsageFailure("--plot needs matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for pool in pools:
        name, sizes = pool.pool.spec.model_id, [point.size for point in pool.curve]
        (line,) = axes.plot(sizes, [point.hit_rate for point in pool.curve], marker="o", markersize=4, label=name)
        axes.plot([1], [pool.recent_hit_rate], marker="x", color=line.get_color(), linestyle="", label=f"{name}: measured")
        axes.axhline(pool.reachable_hit_rate, color=line.get_color(), linestyle="--", linewidth=1, label=f"{name}: endless")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g} x")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="size of the pool", ylabel="hit rate of the last hour", ylim=(0, None))
    axes.grid(alpha=0.3)
    if pools:
        axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise UsageFailure(f"{path} cannot be written: {error.strerror}") from None
