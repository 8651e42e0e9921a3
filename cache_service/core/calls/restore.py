"""Restore: a pool that is new takes over what an earlier run of the service has written down of its index.

Owns the order: tenants, the tree, the blocks. Rules: the pool has had no call yet; a block that no believed row names is free,
unless a process of the earlier run may still write it: then it is in quarantine, under a session of its own that never opens;
a free block may hold another tenant's tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..index.index_record import IndexRecord
from ..index.kept_tree import tree_of
from ..pool_state import PoolState
from ..values.kept_index import KeptIndex
from ..values.types import UNKNOWN_ROOT, SessionId

EARLIER_RUN = SessionId("earlier run")  # in the place of the sessions that an earlier run had


class RestoreResult(NamedTuple):
    """Counts of a restore; dropped rows claimed to say something, and were not believed."""

    num_blocks: int
    num_dropped: int
    num_quarantined: int


def restore(
    state: PoolState, kept: KeptIndex, *, may_still_write: bool, on_behind: Callable[[], None] = lambda: None
) -> RestoreResult:
    """Takes over what is written down, and writes the index down from now on.

    may_still_write: whether a process of an earlier run may map the memory; `end_quarantine(EARLIER_RUN)` says that none does
    any more. on_behind() is called when the kept index begins to lack something.
    """
    record = IndexRecord(kept, len(state.index.block_of_node), on_behind)
    num_claimed = record.table.num_written()
    for tenant in kept.tenants:
        state.pool.limits.name_tenant(tenant, state.index.root(tenant))
    tree = tree_of(record.table.read(), len(kept.tenants))
    blocks = tree.slots.blocks
    record.table.forget_all_but(blocks)
    record.note_restored(tree.slots.names)
    state.index.add_tree(tree, record)
    is_free = np.ones(state.pool.num_blocks, np.bool_)
    is_free[0], is_free[blocks] = False, False
    others = np.flatnonzero(is_free).astype(np.int32)
    state.pool.restore(tree.leaves_first(), others if may_still_write else others[:0])
    if kept.tenants:
        state.allocator.note_loaded(blocks, tree.roots.tolist())
        state.allocator.note_loaded(others, [UNKNOWN_ROOT if len(kept.tenants) > 1 else -1] * len(others))
    if may_still_write:
        state.quarantines[EARLIER_RUN] = others
    state.update_pressure()
    return RestoreResult(len(blocks), num_claimed - len(blocks), len(others) if may_still_write else 0)
