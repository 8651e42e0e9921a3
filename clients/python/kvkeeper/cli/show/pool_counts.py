"""Counts of a pool for people: every field of PoolStats, in groups. A test checks that no field is missing."""

from collections.abc import Iterator
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.console.tables import facts
from kvkeeper.cli.show.status import dtype_word, pool_line
from kvkeeper.common.service.sizes import size

_NEVER = 2**31 - 1  # of a break-even length: no load pays
_GROUP_WORDS = {pb.LAYER_GROUP_KIND_TAIL: "tail", pb.LAYER_GROUP_KIND_CHUNKED: "chunk"}

Rows = list[tuple[str, object]]


def show_pool(pool: Any) -> str:
    """The counts of one PoolStats, a heading above each group."""
    lines = [f"  pool: {pool_line(pool.pool)}"]
    for heading, rows in _groups(pool):
        lines += [f"    {heading}", facts(rows, "      ")]
    return "\n".join(lines)


def pressure_word(level: int) -> str:
    return pb.PressureLevel.Name(level).removeprefix("PRESSURE_LEVEL_").lower()


def carrier_word(carrier: int) -> str:
    """What the steps of a session come on: "lane", "grpc", or "-" while no stream is open."""
    is_open = carrier != pb.STEP_CARRIER_UNSPECIFIED
    return pb.StepCarrier.Name(carrier).removeprefix("STEP_CARRIER_").lower() if is_open else "-"


def _groups(pool: Any) -> Iterator[tuple[str, Rows]]:
    yield "blocks", _blocks(pool)
    yield (
        "sequences and sessions",
        [
            (
                "waiting, running, loading, swapped",
                _counts(
                    pool.num_waiting_sequences,
                    pool.num_running_sequences,
                    pool.num_loading_sequences,
                    pool.num_swapped_sequences,
                ),
            ),
            ("slots in use of slots held", f"{pool.slot_utilization:.1%}"),
            ("sessions, tenants", _counts(pool.num_sessions, pool.num_tenants)),
            ("steps, changes", _counts(pool.num_steps, pool.revision)),
            ("forks, copies on write", _counts(pool.num_forks, pool.num_copies_on_write)),
            ("dropped by retention", pool.num_retention_dropped_blocks),
        ],
    )
    if pool.groups:
        yield (
            "groups of layers: entries of tables with a block, left behind",
            group_counts(pool),
        )
    yield "prefix cache", _prefix_cache(pool)
    if pool.pool.num_host_blocks:
        yield "host tier", _host_tier(pool)
    if pool.pool.num_disk_blocks:
        yield "disk tier", _disk_tier(pool)
    if pool.pool.has_remote:
        yield "remote tier", _remote_tier(pool)
    if pool.pool.num_disk_blocks or pool.pool.has_remote:
        yield "worth of loads", [("prompt tokens computed a second", pool.prefill_rate_tokens)]
    yield (
        "room",
        [
            ("starts granted, refused", _counts(pool.num_starts, pool.num_refused_starts)),
            ("told to wait while the prefix is computed", pool.num_computing_answers),
            ("starts or reservations without blocks", pool.num_refusals),
            ("sequences handed to another session", pool.num_hand_offs),
            ("blocks reserved for the oldest claim", pool.num_claimed_blocks),
            ("pressure, changes of it", f"{pressure_word(pool.pressure)}, {pool.num_pressure_changes:,}"),
        ],
    )
    yield "watches", [("open, cut off", _counts(pool.num_watches, pool.num_lagged_watches))]


def group_counts(pool: Any) -> Rows:
    """For each group of layers: what it reads, and how many entries of tables have a block, and how many it left behind."""
    specs = pool.pool.spec.groups
    return [_of_group(group, specs[at] if at < len(specs) else pb.LayerGroup()) for at, group in enumerate(pool.groups)]


def _of_group(group: Any, spec: Any) -> tuple[str, str]:
    name = _GROUP_WORDS.get(spec.kind, "window")
    words = f"{name} of {group.window_tokens:,} tokens" if group.window_tokens else "all tokens"
    if spec.kind == pb.LAYER_GROUP_KIND_RECURRENT:
        words = f"states, one kept of {spec.checkpoint_blocks:,}"
    return words, _counts(group.num_held_entries, group.num_passed_entries)


def _blocks(pool: Any) -> Rows:
    return [
        ("free", pool.num_free_blocks),
        ("cached", pool.num_cached_blocks),
        ("referenced", f"{pool.num_referenced_blocks:,} ({pool.num_shared_blocks:,} shared)"),
        ("fenced, in transfer", _counts(pool.num_fenced_blocks, pool.num_transfer_blocks)),
        ("quarantined", pool.num_quarantined_blocks),
        ("in use", f"{pool.block_utilization:.1%}, {size(pool.used_bytes)}"),
        ("most ever in use", f"{pool.peak_used_blocks:,}, {size(pool.peak_used_bytes)}"),
        ("cleared for another tenant", pool.num_cleared_blocks),
        ("freed by CollectGarbage", pool.num_collected_blocks),
    ]


def _prefix_cache(pool: Any) -> Rows:
    return [
        ("blocks indexed", pool.num_indexed_blocks),
        ("look-ups, hits, misses", _counts(pool.num_look_ups, pool.num_hits, pool.num_misses)),
        ("full hits with logits", f"{pool.num_full_hits:,} ({pool.num_stored_logits:,} logits stored)"),
        ("tokens looked up, found", f"{_counts(pool.num_look_up_tokens, pool.num_hit_tokens)} ({pool.hit_rate:.1%})"),
        ("found in the last hour", f"{pool.recent_hit_rate:.1%} of {pool.reachable_hit_rate:.1%} that an endless cache finds"),
        ("distinct blocks of that hour, about", pool.num_recent_distinct_blocks),
        ("blocks adopted", pool.num_adopted_blocks),
        ("blocks evicted first, last, by hints", _counts(pool.num_no_reuse_blocks, pool.num_soon_blocks)),
        ("blocks evicted", f"{pool.num_evicted_blocks:,} ({pool.num_quota_evictions:,} of them over a quota)"),
        ("blocks expired", pool.num_expired_blocks),
        ("pins", f"{pool.num_pins:,} on {pool.num_pinned_blocks:,} blocks"),
    ]


def precision_text(info: Any) -> str:
    """What the host tier, and those behind it, keep K and V in, and what that takes of a block on the device."""
    if not info.host_kv_dtype:
        return "as on the device"
    return f"{dtype_word(info.host_kv_dtype)}, {info.host_block_bytes / info.block_bytes:.2f} of the bytes"


def _host_tier(pool: Any) -> Rows:
    return [
        ("K and V kept in", precision_text(pool.pool)),
        ("blocks free, cached", _counts(pool.num_free_host_blocks, pool.num_cached_host_blocks)),
        ("blocks held, busy", _counts(pool.num_held_host_blocks, pool.num_busy_host_blocks)),
        ("sequences swapped out, in", _counts(pool.num_swap_outs, pool.num_swap_ins)),
        ("blocks demoted, promoted", _counts(pool.num_demoted_blocks, pool.num_promoted_blocks)),
        ("host blocks evicted", pool.num_evicted_host_blocks),
        ("transfers, failed", _counts(pool.num_transfers, pool.num_failed_transfers)),
    ]


def _remote_tier(pool: Any) -> Rows:
    return [
        ("blocks on their way or waiting", pool.num_queued_remote_blocks),
        ("loads, of them too late", _counts(pool.num_remote_loads, pool.num_late_remote_loads)),
        ("blocks loaded, stored", _counts(pool.num_remote_hit_blocks, pool.num_remote_stored_blocks)),
        ("read, written a second", f"{size(pool.remote_read_rate_bytes)}, {size(pool.remote_write_rate_bytes)}"),
        ("blocks damaged, failed", _counts(pool.num_damaged_remote_blocks, pool.num_failed_remote_blocks)),
        ("rests after failures", pool.num_remote_rests),
        ("first byte of a load, milliseconds", f"{1000 * pool.remote_first_byte_seconds:,.1f}"),
        ("a load pays", break_even(pool.remote_break_even_tokens)),
        ("loads not worth it", pool.num_unworthy_remote_loads),
    ]


def _disk_tier(pool: Any) -> Rows:
    in_slots = pool.num_free_disk_blocks, pool.num_cached_disk_blocks, pool.num_busy_disk_blocks
    return [
        ("blocks free, cached, busy", _counts(*in_slots)),
        ("blocks on their way or waiting", pool.num_queued_disk_blocks),
        ("loads, of them too late", _counts(pool.num_disk_loads, pool.num_late_disk_loads)),
        ("blocks loaded, stored", _counts(pool.num_disk_hit_blocks, pool.num_disk_stored_blocks)),
        ("read, written a second", f"{size(pool.disk_read_rate_bytes)}, {size(pool.disk_write_rate_bytes)}"),
        ("disk blocks evicted", pool.num_evicted_disk_blocks),
        ("blocks damaged, failed", _counts(pool.num_damaged_disk_blocks, pool.num_failed_disk_blocks)),
        ("rests after failures", pool.num_disk_rests),
        ("first byte of a load, milliseconds", f"{1000 * pool.disk_first_byte_seconds:,.1f}"),
        ("a load pays", break_even(pool.disk_break_even_tokens)),
        ("loads not worth it", pool.num_unworthy_disk_loads),
    ]


def _counts(*values: int) -> str:
    return ", ".join(f"{value:,}" for value in values)


def break_even(num_tokens: int) -> str:
    """The length from which on a load pays."""
    if not num_tokens:
        return "not measured yet"
    return "never" if num_tokens == _NEVER else f"from {num_tokens:,} tokens on"
