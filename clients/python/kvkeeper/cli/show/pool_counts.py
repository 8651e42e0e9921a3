"""Counts of a pool for people: every field of PoolStats, in groups. A test checks that no field is missing."""

from collections.abc import Iterable, Iterator
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.console.tables import facts
from kvkeeper.cli.show.status import dtype_word, pool_line
from kvkeeper.common.service.sizes import size

_NEVER = 2**31 - 1  # of a break-even length: no load pays
_GROUP_WORDS = {pb.LAYER_GROUP_KIND_TAIL: "tail", pb.LAYER_GROUP_KIND_CHUNKED: "chunk"}

# Of each group its rows: what stands left, and on the right the fields in the words of _words.
_BLOCKS = {
    "free": "{num_free_blocks}",
    "cached": "{num_cached_blocks}",
    "referenced": "{num_referenced_blocks} ({num_shared_blocks} shared)",
    "fenced, in transfer": "{num_fenced_blocks}, {num_transfer_blocks}",
    "quarantined": "{num_quarantined_blocks}",
    "in use": "{block_utilization}, {used_bytes}",
    "most ever in use": "{peak_used_blocks}, {peak_used_bytes}",
    "cleared for another tenant": "{num_cleared_blocks}",
    "freed by CollectGarbage": "{num_collected_blocks}",
}
_SEQUENCES = {
    "waiting, running, loading, swapped": "{num_waiting_sequences}, {num_running_sequences}, {num_loading_sequences},"
    " {num_swapped_sequences}",
    "slots in use of slots held": "{slot_utilization}",
    "sessions, tenants": "{num_sessions}, {num_tenants}",
    "steps, changes": "{num_steps}, {revision}",
    "forks, copies on write": "{num_forks}, {num_copies_on_write}",
    "dropped by retention": "{num_retention_dropped_blocks}",
}
_PREFIX_CACHE = {
    "blocks indexed": "{num_indexed_blocks}",
    "look-ups, hits, misses": "{num_look_ups}, {num_hits}, {num_misses}",
    "full hits with logits": "{num_full_hits} ({num_stored_logits} logits stored)",
    "tokens looked up, found": "{num_look_up_tokens}, {num_hit_tokens} ({hit_rate})",
    "found in the last hour": "{recent_hit_rate} of {reachable_hit_rate} that an endless cache finds",
    "distinct blocks of that hour, about": "{num_recent_distinct_blocks}",
    "blocks adopted": "{num_adopted_blocks}",
    "blocks evicted first, last, by hints": "{num_no_reuse_blocks}, {num_soon_blocks}",
    "blocks evicted": "{num_evicted_blocks} ({num_quota_evictions} of them over a quota)",
    "blocks expired": "{num_expired_blocks}",
    "pins": "{num_pins} on {num_pinned_blocks} blocks",
}
_HOST_TIER = {
    "K and V kept in": "{precision}",
    "blocks free, cached": "{num_free_host_blocks}, {num_cached_host_blocks}",
    "blocks held, busy": "{num_held_host_blocks}, {num_busy_host_blocks}",
    "sequences swapped out, in": "{num_swap_outs}, {num_swap_ins}",
    "blocks demoted, promoted": "{num_demoted_blocks}, {num_promoted_blocks}",
    "host blocks evicted": "{num_evicted_host_blocks}",
    "transfers, failed": "{num_transfers}, {num_failed_transfers}",
}
_DISK_SLOTS = {
    "blocks free, cached, busy": "{num_free_disk_blocks}, {num_cached_disk_blocks}, {num_busy_disk_blocks}",
    "disk blocks evicted": "{num_evicted_disk_blocks}",
}
_BEHIND_THE_HOST = {  # TIER: disk or remote
    "blocks on their way or waiting": "{num_queued_TIER_blocks}",
    "loads, of them too late": "{num_TIER_loads}, {num_late_TIER_loads}",
    "blocks loaded, stored": "{num_TIER_hit_blocks}, {num_TIER_stored_blocks}",
    "read, written a second": "{TIER_read_rate_bytes}, {TIER_write_rate_bytes}",
    "blocks damaged, failed": "{num_damaged_TIER_blocks}, {num_failed_TIER_blocks}",
    "rests after failures": "{num_TIER_rests}",
    "first byte of a load, milliseconds": "{TIER_first_byte_seconds}",
    "a load pays": "{TIER_break_even_tokens}",
    "loads not worth it": "{num_unworthy_TIER_loads}",
}
_ROOM = {
    "starts granted, refused": "{num_starts}, {num_refused_starts}",
    "told to wait while the prefix is computed": "{num_computing_answers}",
    "starts or reservations without blocks": "{num_refusals}",
    "sequences handed to another session": "{num_hand_offs}",
    "blocks reserved for the oldest claim": "{num_claimed_blocks}",
    "pressure, changes of it": "{pressure}, {num_pressure_changes}",
}


def show_pool(pool: Any) -> str:
    """The counts of one PoolStats, a heading above each group."""
    lines = [f"  pool: {pool_line(pool.pool)}"]
    words = _words(pool)
    for heading, rows in _groups(pool):
        filled = [(label, text.format_map(words)) for label, text in rows]
        lines += [f"    {heading}", facts(filled, "      ")]
    return "\n".join(lines)


def pressure_word(level: int) -> str:
    return pb.PressureLevel.Name(level).removeprefix("PRESSURE_LEVEL_").lower()


def carrier_word(carrier: int) -> str:
    """What the steps of a session come on: "lane", "grpc", or "-" while no stream is open."""
    is_open = carrier != pb.STEP_CARRIER_UNSPECIFIED
    return pb.StepCarrier.Name(carrier).removeprefix("STEP_CARRIER_").lower() if is_open else "-"


def _groups(pool: Any) -> Iterator[tuple[str, Iterable[tuple[str, str]]]]:
    yield "blocks", _BLOCKS.items()
    yield "sequences and sessions", _SEQUENCES.items()
    if pool.groups:
        yield "groups of layers: entries of tables with a block, left behind", group_counts(pool)
    yield "prefix cache", _PREFIX_CACHE.items()
    if pool.pool.num_host_blocks:
        yield "host tier", _HOST_TIER.items()
    behind = [name for name, has in (("disk", pool.pool.num_disk_blocks), ("remote", pool.pool.has_remote)) if has]
    for name in behind:
        rows = {label: text.replace("TIER", name) for label, text in _BEHIND_THE_HOST.items()}
        yield f"{name} tier", ((_DISK_SLOTS if name == "disk" else {}) | rows).items()
    if behind:
        yield "worth of loads", [("prompt tokens computed a second", "{prefill_rate_tokens}")]
    yield "room", _ROOM.items()
    yield "watches", [("open, cut off", "{num_watches}, {num_lagged_watches}")]


def _words(pool: Any) -> dict[str, str]:
    """Each number of a PoolStats as people read it."""
    numbers = {field.name: getattr(pool, field.name) for field in pool.DESCRIPTOR.fields if field.message_type is None}
    words = {name: _word(name, value) for name, value in numbers.items()}
    return {**words, "pressure": pressure_word(pool.pressure), "precision": precision_text(pool.pool)}


def _word(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return size(int(value))
    if name.endswith("_break_even_tokens"):
        return break_even(int(value))
    if name.endswith("_first_byte_seconds"):
        return f"{1000 * value:,.1f}"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def group_counts(pool: Any) -> list[tuple[str, str]]:
    """For each group of layers: what it reads, and how many entries of tables have a block, and how many it left behind."""
    specs = pool.pool.spec.groups
    return [_of_group(group, specs[at] if at < len(specs) else pb.LayerGroup()) for at, group in enumerate(pool.groups)]


def _of_group(group: Any, spec: Any) -> tuple[str, str]:
    name = _GROUP_WORDS.get(spec.kind, "window")
    words = f"{name} of {group.window_tokens:,} tokens" if group.window_tokens else "all tokens"
    if spec.kind == pb.LAYER_GROUP_KIND_RECURRENT:
        words = f"states, one kept of {spec.checkpoint_blocks:,}"
    elif spec.HasField("page"):
        words += f", pages of {size(spec.page.page_bytes)}"
    elif spec.num_kv_heads:
        words += f", {spec.num_kv_heads:,} KV heads of {spec.head_dim:,}"
    return words, f"{group.num_held_entries:,}, {group.num_passed_entries:,}"


def precision_text(info: Any) -> str:
    """What the host tier, and those behind it, keep K and V in, and what that takes of a block on the device."""
    if not info.host_kv_dtype:
        return "as on the device"
    return f"{dtype_word(info.host_kv_dtype)}, {info.host_block_bytes / info.block_bytes:.2f} of the bytes"


def break_even(num_tokens: int) -> str:
    """The length from which on a load pays."""
    if not num_tokens:
        return "not measured yet"
    return "never" if num_tokens == _NEVER else f"from {num_tokens:,} tokens on"
