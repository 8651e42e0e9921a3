"""`kvkeeper stats`: counts of the pools, the sessions and the engine."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.cli.console.addresses import add_cache_flag, add_engine_flag, add_json_flag
from kvkeeper.cli.console.messages import as_json
from kvkeeper.cli.console.outcome import OPTIONS, failure
from kvkeeper.cli.console.problems import EXIT_OK
from kvkeeper.cli.console.tables import facts, table
from kvkeeper.cli.show.pool_counts import carrier_word, show_pool
from kvkeeper.client import CacheClient, EngineClient, KvkeeperError
from kvkeeper.engine.v1 import engine_service_pb2 as engine_pb


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_cache_flag(parser)
    add_engine_flag(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Shows the counts of each service that answers, even if the other is down."""
    exit_code = EXIT_OK
    report: dict[str, object] = {}
    for name, ask, show in (("cache", _ask_cache, _show_cache), ("engine", _ask_engine, _show_engine)):
        args.asks = name
        try:
            answer = ask(getattr(args, name))
        except KvkeeperError as error:
            exit_code = max(exit_code, failure(error, args))
            continue
        if args.json:
            report[name] = as_json(answer)
        else:
            print(show(answer), end="\n\n" if name == "cache" else "\n")
    if args.json:
        print(json.dumps(report))
    sys.stdout.flush()
    return exit_code


def _ask_cache(address: str) -> cache_pb.GetStatsResponse:
    with CacheClient(address, OPTIONS) as client:
        return client.stats()


def _ask_engine(address: str) -> engine_pb.GetStatsResponse:
    with EngineClient(address, OPTIONS) as client:
        return client.stats()


def _show_cache(stats: Any) -> str:
    parts = [
        "cache service",
        facts(
            [
                ("up for", f"{stats.uptime_seconds:,.0f} s"),
                ("sessions opened, reaped", f"{stats.num_opened_sessions:,}, {stats.num_reaped_sessions:,}"),
            ],
            "  ",
        ),
    ]
    parts += [show_pool(pool) for pool in stats.pools] or ["  no pool yet"]
    if stats.sessions:
        headers = ("session", "client", "step", "completed", "sequences", "lease left ms", "attached", "steps over")
        rows = [
            (
                session.session_id[:8],
                session.client_name,
                session.step_id,
                session.completed_step_id,
                session.num_sequences,
                session.lease_left_ms,
                session.num_attached_processes,
                carrier_word(session.step_carrier),
            )
            for session in stats.sessions
        ]
        parts += ["", table(headers, rows)]
    return "\n".join(parts)


def _most_first(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1])) or "none"


def _show_engine(stats: Any) -> str:
    rows: list[tuple[str, object]] = [
        ("up for", f"{stats.uptime_seconds:,.0f} s"),
        ("requests waiting, running", f"{stats.num_waiting_requests:,}, {stats.num_running_requests:,}"),
        ("they start by, policy switches", f"{stats.scheduling_policy}, {stats.num_policy_switches:,}"),
        ("requests completed", stats.num_completed_requests),
        ("requests failed, cancelled", f"{stats.num_failed_requests:,}, {stats.num_cancelled_requests:,}"),
        ("preemptions, of them swapped out", f"{stats.num_preemptions:,}, {stats.num_swapped_out:,}"),
        ("prompt tokens cached, computed", f"{stats.num_cached_tokens:,}, {stats.num_prefill_tokens:,}"),
        ("tokens sampled", stats.num_new_tokens),
        ("steps", stats.num_steps),
        ("steps that waited, by cause", _most_first(stats.num_step_waits)),
        (
            "time to first token p50, p99",
            f"{stats.time_to_first_token_p50_ms:.1f} ms, {stats.time_to_first_token_p99_ms:.1f} ms",
        ),
        (
            "time between tokens p50, p99",
            f"{stats.time_between_tokens_p50_ms:.1f} ms, {stats.time_between_tokens_p99_ms:.1f} ms",
        ),
        ("batch, token budget in use", f"{stats.batch_utilization:.1%}, {stats.token_budget_utilization:.1%}"),
        ("KV blocks held", f"{stats.kv_utilization:.1%}"),
        ("waiting for the cache service", f"{stats.cache_wait_share:.1%} of a step"),
        ("blocks copied on write", stats.num_copied_blocks),
        ("cache session", stats.cache_session_id[:8] or "none"),
    ]
    return f"engine service\n{facts(rows, '  ')}"
