"""Restore: a pool that is new takes over what an earlier run of the service has written down of its index.

Owns the order: roots, the tree, the blocks of both tiers. Rules: the pool has had no call yet; a block that no believed row
names is free, unless a process of the earlier run may still write it: then it is in quarantine, under a session of its own that
never opens; a free block may hold another tenant's tokens. Where rows have digests, a sample of the believed blocks is compared
with them; one that differs has all compared, and those that differ are forgotten with what only they lead to.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..index.index_record import IndexRecord, TierRecord
from ..index.kept_tree import Damage, KeptTree, find_damaged, make_tree
from ..pool_state import PoolState
from ..tiers.host_tier import HostTier
from ..values.kept_index import KeptIndex, Verification
from ..values.kv_spec import ReadSpan
from ..values.types import NO_INT32, UNKNOWN_TENANT, Int32Array, SessionId, Tier

EARLIER_RUN = SessionId("earlier run")  # in the place of the sessions that an earlier run had


class RestoreResult(NamedTuple):
    """Counts of a restore. Dropped rows claimed to say something, and were not believed; of both tiers, as are these.

    verified: blocks compared with their digests; damaged: those of them that differed.
    """

    num_blocks: int
    num_host_blocks: int
    num_dropped: int
    num_verified: int
    num_damaged: int
    num_quarantined: int
    num_quarantined_hosts: int


def restore(
    state: PoolState,
    hosts: HostTier | None,
    kept: KeptIndex,
    *,
    may_still_write: bool,
    on_behind: Callable[[], None] = lambda: None,
    verification: Verification | None = None,
) -> RestoreResult:
    """Takes over what is written down, and writes the index down from now on.

    may_still_write: whether a process of an earlier run may map the memory; `end_quarantine(EARLIER_RUN)` says that none does
    any more. on_behind() is called when the kept index begins to lack something. verification: how blocks are compared with
    their digests, where they are.
    """
    record = IndexRecord(kept, state.index.held, state.index.key, on_behind)
    records = [one for one in (record.device, record.hosts) if one is not None]
    num_claimed = sum(one.table.num_written() for one in records)
    roots = state.index.roots
    state.index.add_roots(kept.scopes)
    for tenant, number in roots.tenants.items():
        state.pool.limits.name_tenant(tenant, number)
    tree, damage = _believed(records, kept.scopes, verification, state.config.group_spans)
    record.note_restored(tree.names)
    state.index.add_tree(tree, record)
    blocks, others = _restore_device(state, record.device, tree, may_still_write=may_still_write)
    num_hosts = num_quarantined_hosts = 0
    if record.hosts is not None:
        assert hosts is not None, "a table for a host tier that is not there"
        num_hosts, num_quarantined_hosts = _restore_hosts(hosts, record.hosts, tree, may_still_write=may_still_write)
    if kept.scopes or kept.num_nameless:
        of_blocks = np.concatenate([tree.roots[places > 0] for places in (tree.blocks, *tree.group_blocks)])
        state.allocator.note_loaded(blocks, roots.tenant_of[-of_blocks].tolist())
        is_of_one = not kept.num_nameless and len(roots.tenants) == 1
        state.allocator.note_loaded(others, [-1 if is_of_one else UNKNOWN_TENANT] * len(others))
    state.update_pressure()
    return RestoreResult(
        len(blocks),
        num_hosts,
        num_claimed - len(blocks) - num_hosts,
        damage.num_compared,
        damage.num_blocks,
        len(others) if may_still_write else 0,
        num_quarantined_hosts,
    )


def _restore_device(
    state: PoolState, record: TierRecord, tree: KeptTree, *, may_still_write: bool
) -> tuple[Int32Array, Int32Array]:
    """The device blocks of the tree, in its order, group by group, and all others."""
    record.table.forget_all_but(tree.all_blocks)
    others = _others(state.pool.num_blocks, tree.all_blocks)
    cached = _leaves_first(tree, tree.blocks, tree.group_blocks)
    state.pool.restore(cached, others if may_still_write else NO_INT32)
    if may_still_write:
        state.quarantines[EARLIER_RUN] = others
    return tree.all_blocks, others


def _restore_hosts(hosts: HostTier, record: TierRecord, tree: KeptTree, *, may_still_write: bool) -> tuple[int, int]:
    """(blocks of the host tier in the tree, those in quarantine)."""
    record.table.forget_all_but(tree.all_hosts)
    withheld = _others(hosts.num_blocks, tree.all_hosts) if may_still_write else NO_INT32
    hosts.restore(_leaves_first(tree, tree.hosts, tree.group_hosts), EARLIER_RUN, withheld)
    return len(tree.all_hosts), len(withheld)


def _leaves_first(tree: KeptTree, places: Int32Array, of_groups: Int32Array) -> Int32Array:
    """Node by node, the first group's block before those of the others."""
    by_node = np.vstack([places, *of_groups])[:, tree.leaves_first()]
    ordered = by_node.T.ravel()
    return ordered[ordered > 0]


def _others(num_blocks: int, named: Int32Array) -> Int32Array:
    """All blocks of a tier but those, and the null block."""
    is_other = np.ones(num_blocks, np.bool_)
    is_other[0] = False
    is_other[named] = False  # 0 stands for none
    return np.flatnonzero(is_other).astype(np.int32)


def _believed(
    records: list[TierRecord],
    scopes: tuple[str | None, ...],
    verification: Verification | None,
    group_spans: tuple[ReadSpan, ...],
) -> tuple[KeptTree, Damage]:
    """The tree of what is believed, and what a comparison with the digests has found before."""
    slots, num_roots = [record.table.read() for record in records], len(scopes)
    if unknown := [-place - 1 for place, scope in enumerate(scopes) if scope is None]:
        slots = [of_tier.at(np.flatnonzero(~np.isin(of_tier.parents, unknown))) for of_tier in slots]
    tree = make_tree(slots[0], num_roots, slots[1] if len(slots) > 1 else None, group_spans)
    if verification is None:
        return tree, Damage(0, [])
    believed = [of_tier.of_blocks(places) for of_tier, places in zip(slots, (tree.all_blocks, tree.all_hosts), strict=False)]
    damage = find_damaged(list(zip((Tier.DEVICE, Tier.HOST), believed, strict=False)), verification)
    if damage.num_blocks:
        left = [of_tier.without_blocks(bad) for of_tier, bad in zip(believed, damage.blocks, strict=True)]
        tree = make_tree(left[0], num_roots, left[1] if len(left) > 1 else None, group_spans)
    return tree, damage
