"""Counts of a pool for people and dashboards, derived from the state whenever they are asked for."""

from dataclasses import fields

import numpy as np

from ..index.miss_counts import AGES, OTHERS
from ..pool_state import PoolState
from ..sequences.sequence_table import SequenceTable
from ..tables.prompt_watch import PromptWatch
from ..tiers.sequence_swap import SequenceSwapper
from ..values.types import NO_TENANT, Int64Array, SequenceState
from ..values.views import GroupStats, Miss, PoolStats

ALL_OTHERS = "*"  # in the place of a tenant's name, which it cannot be


def pool_stats(state: PoolState, swapper: SequenceSwapper | None, prompts: PromptWatch) -> PoolStats:
    """Costs a look at every sequence, but at no block, and at every state of a group of states."""
    pool, seqs, counters, gauge = state.pool, state.sequences, state.counters, state.gauge
    running = seqs.running_slots()
    num_reserved = seqs.num_reserved[running]
    num_holes = int(_count_holes(seqs, running).sum())
    num_reserved = num_reserved * np.int64(seqs.num_groups)
    num_entries = int((-(-seqs.num_reserved[running] // seqs.block_size)).sum()) * seqs.num_groups
    num_slots = (num_entries - num_holes) * seqs.block_size
    return PoolStats(
        num_free_blocks=len(pool.free),
        num_cached_blocks=pool.num_evictable,
        num_referenced_blocks=pool.num_referenced,
        num_fenced_blocks=pool.num_fenced,
        num_quarantined_blocks=pool.num_quarantined,
        num_indexed_blocks=pool.num_indexed,
        peak_used_blocks=pool.peak_used,
        num_shared_blocks=pool.num_shared,
        num_waiting_sequences=int(np.count_nonzero(seqs.states == SequenceState.WAITING)),
        num_running_sequences=len(running),
        slot_utilization=float((num_reserved.sum() - num_holes * seqs.block_size) / num_slots) if num_slots else 1.0,
        num_evicted_blocks=pool.num_evicted + counters.num_retention_dropped_blocks,
        revision=state.revision,
        pressure=gauge.level,
        num_claimed_blocks=state.claims.num_reserved,
        num_pressure_changes=gauge.num_changes,
        num_sessions=len(state.sessions),
        num_misses=counters.num_look_ups - counters.num_hits,
        hit_rate=counters.num_hit_tokens / counters.num_look_up_tokens if counters.num_look_up_tokens else 0.0,
        block_utilization=pool.num_used / (pool.num_blocks - 1),
        num_pins=len(state.pins),
        num_pinned_blocks=state.pins.num_blocks,
        num_transfer_blocks=pool.num_in_transfer,
        num_loading_sequences=int(np.count_nonzero(seqs.states == SequenceState.LOADING)),
        num_swapped_sequences=int(np.count_nonzero(seqs.states == SequenceState.SWAPPED)),
        num_tenants=len(state.index.roots.tenants),
        num_expired_blocks=pool.limits.num_expired + (swapper.host.pool.limits.num_expired if swapper is not None else 0),
        num_quota_evictions=pool.limits.num_quota_evictions,
        num_stored_logits=len(state.index.logits.by_node),
        num_partial_nodes=len(state.index.partials),
        num_no_reuse_blocks=pool.reuse.num_none if pool.reuse is not None else 0,
        num_soon_blocks=pool.reuse.num_soon if pool.reuse is not None else 0,
        prefill_rate_tokens=prompts.tokens_per_second,
        **state.reach.stats()._asdict(),
        misses=_misses(state),
        curve=state.reach.curve(),
        **{field.name: getattr(counters, field.name) for field in fields(counters)},
        **_host_stats(swapper),
        **(state.below.stats() if state.below is not None else {}),
    )


def group_stats(state: PoolState) -> list[GroupStats]:
    """Statistics of each group of layers; none where all layers are one. Costs a look at every sequence, but at no block."""
    seqs = state.sequences
    if seqs.num_groups == 1:
        return []
    running = seqs.running_slots()
    num_entries = int((-(-seqs.num_reserved[running] // seqs.block_size)).sum())
    num_holes = _count_holes(seqs, running).tolist()
    return [
        GroupStats(span.num_tokens, num_entries - holes, holes) for span, holes in zip(seqs.group_spans, num_holes, strict=True)
    ]


def _count_holes(seqs: SequenceTable, slots: Int64Array) -> Int64Array:
    """[groups] entries without a block in the tables of these sequences. Looks at each entry of a group of states."""
    ends = seqs.tables.hole_ends[slots]
    num_holes = ends.sum(axis=0, dtype=np.int64)
    num_holes[0] -= np.minimum(ends[:, 0], -(-seqs.num_sink[slots] // seqs.block_size)).sum()
    for group in seqs.new_entries.state_groups:
        tables = [seqs.tables.get(slot, group) for slot in slots.tolist()]
        num_holes[group] = sum(len(table) - int(np.count_nonzero(table)) for table in tables)
    return num_holes


def _misses(state: PoolState) -> list[Miss]:
    """The most tokens first."""
    names = {number: name for name, number in state.index.roots.tenants.items()} | {NO_TENANT: "", OTHERS: ALL_OTHERS}
    turnovers = (*AGES, 0.0)
    found = [
        Miss(names[kind.tenant], kind.cause, kind.need, names[kind.by], turnovers[kind.age] if kind.need else 0.0, num_tokens)
        for kind, num_tokens in state.misses.counts().items()
    ]
    return sorted(found, key=lambda miss: -miss.num_tokens)


def _host_stats(swapper: SequenceSwapper | None) -> dict[str, int]:
    """Those of the host tier; none where there is no such tier."""
    if swapper is None:
        return {}
    host, offloader = swapper.host, swapper.offloader
    return {
        "num_free_host_blocks": len(host.pool.free),
        "num_cached_host_blocks": host.num_cached,
        "num_held_host_blocks": host.num_held,
        "num_busy_host_blocks": host.num_busy,
        "num_swap_outs": swapper.num_swap_outs,
        "num_swap_ins": swapper.num_swap_ins,
        "num_demoted_blocks": offloader.num_demoted,
        "num_promoted_blocks": offloader.num_promoted,
        "num_evicted_host_blocks": host.pool.num_evicted,
        "num_transfers": offloader.transfers.num_issued,
        "num_failed_transfers": offloader.transfers.num_failed,
    }
