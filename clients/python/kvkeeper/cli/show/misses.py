"""`kvkeeper misses`: why tokens of prompts were not found in the cache, and what would have found them."""

import argparse
from collections import Counter
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.console.addresses import add_cache_flag, add_json_flag
from kvkeeper.cli.console.messages import as_json
from kvkeeper.cli.console.problems import EXIT_OK
from kvkeeper.cli.console.tables import table
from kvkeeper.cli.show.each_pool import print_pools, read_pools
from kvkeeper.cli.show.status import pool_line

_HEADERS = ("why", "for", "turnovers ago", "tenant", "tokens", "of all")
_ALL_OTHERS = "*"
WORDS = {
    pb.MATCH_END_PARTIAL_BLOCK: "less than a block, or the last token",
    pb.MATCH_END_NEVER_STORED: "never there, or long forgotten",
    pb.MATCH_END_EVICTED: "evicted",
    pb.MATCH_END_EXPIRED: "outlived its time",
    pb.MATCH_END_CLEARED: "cleared",
    pb.MATCH_END_COMPUTING: "still being computed",
    pb.MATCH_END_BELOW_MINIMUM: "below the least prefix",
    pb.MATCH_END_ON_DISK: "on the disk, and not loaded in time",
    pb.MATCH_END_DISK_RESTS: "on a disk that rests",
    pb.MATCH_END_NOT_WORTH_LOADING: "on the disk, and not worth loading",
    pb.MATCH_END_BEHIND_A_HOLE: "not shared, or behind a hole",
    pb.MATCH_END_OTHER_TENANT: "cached for another tenant, adapter or salt",
    pb.MATCH_END_NOT_ASKED: "not asked for",
    pb.MATCH_END_NOT_LOADED: "in the host tier, and not loaded",
    pb.MATCH_END_LOADING: "being loaded",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_cache_flag(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """A table for each pool. Raises KvkeeperError."""
    print_pools(read_pools(args.cache), show_misses, lambda pool: {"misses": [*map(as_json, pool.misses)]}, is_json=args.json)
    return EXIT_OK


def show_misses(pool: Any) -> str:
    """What was looked up and not found, the most first, and a sentence on it."""
    total = max(pool.num_look_up_tokens, 1)
    rows = [
        (
            WORDS.get(miss.cause, "another cause"),
            _evictor(miss),
            _age(miss),
            _tenant(miss.tenant),
            miss.num_tokens,
            f"{miss.num_tokens / total:.1%}",
        )
        for miss in sorted(pool.misses, key=lambda miss: -miss.num_tokens)
    ]
    missed = table(_HEADERS, rows) if rows else "nothing was missed yet"
    return "\n".join([f"pool: {pool_line(pool.pool)}", missed, "", _in_words(pool, total)])


def _in_words(pool: Any, total: int) -> str:
    """The hit rate, what twice the pool would do for it, and for whom most of what was missed had been evicted."""
    text = f"Your hit rate is {pool.hit_rate:.1%} of {pool.num_look_up_tokens:,} tokens, and of the last hour"
    text += f" {pool.recent_hit_rate:.1%}."
    rates = {point.size: point.hit_rate for point in pool.curve}
    if rates:
        text += f" In that hour a pool that keeps what was used last would have had {rates[1.0]:.1%},"
        text += f" and {rates[2.0]:.1%} with 2 times the size."
    evicted: Counter[str] = Counter()
    for miss in pool.misses:
        if miss.cause == pb.MATCH_END_EVICTED:
            evicted[_evictor(miss)] += miss.num_tokens
    for whom, num_tokens in evicted.most_common(1):
        text += f" {num_tokens / total:.1%} of all tokens had been evicted for {whom}."
    return text


def _evictor(miss: Any) -> str:
    if miss.need == pb.EVICTION_NEED_OWN:
        return "the same tenant"
    if miss.need == pb.EVICTION_NEED_OTHER:
        return f"tenant {_tenant(miss.evicted_for)}" if miss.evicted_for else "another tenant"
    return "a limit or a call" if miss.need == pb.EVICTION_NEED_NO_TENANT else "-"


def _age(miss: Any) -> str:
    if miss.need == pb.EVICTION_NEED_UNSPECIFIED:
        return "-"
    return f"up to {miss.within_turnovers:g}" if miss.within_turnovers else "more"


def _tenant(name: str) -> str:
    return "(others)" if name == _ALL_OTHERS else name or "-"
