"""The whole audit of one pool: what rules R1, R2 and R5 say about its state, recomputed from scratch.

Compares every derived number with what it is derived from. Runs after each step in tests and on demand in production; it
raises nothing and changes nothing. Texts name blocks and sequences by number only.
"""

import numpy as np

from ..blocks.block_pool import BlockPool
from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..values.types import NULL_BLOCK, Int32Array, SequenceState


def violations(state: PoolState) -> list[str]:
    """One sentence per violation; empty when all is well. Costs a look at every block and every table entry."""
    owners, quarantines = [*state.sessions.values(), *state.ended_sessions], list(state.quarantines.values())
    wrong = [*_check_counters(state, owners)]
    if wrong:
        return wrong  # tables cannot be read by wrong counters
    running = state.sequences.running_slots().tolist()
    holding = state.sequences.holding_slots().tolist()
    pins = [pin.blocks for pin in state.pins.live()]
    named = np.concatenate([np.empty(0, np.int32), *map(state.sequences.held, holding), *pins])
    if len(named) and (int(named.min()) < 1 or int(named.max()) >= state.pool.num_blocks):
        return ["a block table or a pin names a block that is not there"]
    wrong.extend(_check_blocks(state, owners, quarantines, named))
    wrong.extend(state.index.check())
    wrong.extend(_check_pins(state, owners))
    wrong.extend(state.publisher.check())
    wrong.extend(state.claims.check())
    for slot in running:
        row = state.sequences.table(slot)
        wrong.extend(_check_sequence(state, slot, row))
        wrong.extend(_check_retention(state, slot, row))
    return wrong


def _check_counters(state: PoolState, owners: list[SessionState]) -> list[str]:
    seqs = state.sequences
    live = seqs.live_slots()
    wrong: list[str] = []
    for name, bad in (
        ("more committed than known", seqs.num_committed[live] > seqs.num_tokens[live]),
        ("more committed than reserved", seqs.num_committed[live] > seqs.num_reserved[live]),
        ("more than its most tokens", np.maximum(seqs.num_tokens, seqs.num_reserved)[live] > seqs.max_tokens[live]),
        ("no place in the order of arrivals", seqs.start_numbers[live] < 1),
        ("blocks while it waits", (seqs.states[live] == SequenceState.WAITING) & (seqs.num_reserved[live] > 0)),
    ):
        wrong.extend(f"sequence {int(i)} has {name}" for i in seqs.ids[live[bad]])
    owned = {slot: owner.number for owner in owners for slot in owner.ids.items()[1].tolist()}
    if sorted(owned) != live.tolist() or any(seqs.owners[slot] != number for slot, number in owned.items()):
        wrong.append("sequences and the sessions that own them disagree")
    if seqs.num_retaining != np.count_nonzero(seqs.num_window[live]):
        wrong.append("the number of sequences with retention is wrong")
    if seqs.num_free_slots + len(live) != len(seqs.ids):
        wrong.append("free and used sequence slots do not add up")
    return wrong


def _check_blocks(state: PoolState, owners: list[SessionState], quarantines: list[Int32Array], named: Int32Array) -> list[str]:
    pool, size = state.pool, state.pool.num_blocks
    wrong: list[str] = []
    fenced = np.concatenate([np.empty(0, np.int32), *(owner.fenced_blocks() for owner in owners)])
    quarantined = np.concatenate([np.empty(0, np.int32), *quarantines])
    for name, counts, entries in (
        ("references", pool.ref_counts, named),
        ("fences", pool.fence_counts, fenced),
        ("quarantines", pool.quarantine_counts, quarantined),
    ):
        differ = np.flatnonzero(counts != np.bincount(entries, minlength=size))
        wrong.extend(f"block {block} has the wrong number of {name}" for block in differ.tolist())
    if (pool.indexed != (state.index.node_of_block > 0)).any():
        wrong.append("pool and index disagree on what is indexed")
    wrong.extend(_check_copies(pool, owners))
    wrong.extend(check_orders(pool))
    if pool.num_fenced + pool.num_quarantined + pool.num_in_transfer != np.count_nonzero(
        (pool.ref_counts == 0) & ((pool.fence_counts | pool.busy_counts) > 0)
    ):
        wrong.append("the numbers of fenced, quarantined and moving blocks are wrong")
    return wrong


def _check_copies(pool: BlockPool, owners: list[SessionState]) -> list[str]:
    """A block that a copy in flight fills is held until the copy has run, and is not shared."""
    filling = np.zeros(pool.num_blocks, np.bool_)
    for owner in owners:
        filling[owner.filling_blocks()] = True
    wrong: list[str] = []
    if (filling != pool.is_filling).any():
        wrong.append("the blocks that copies fill are not those of the copies in flight")
    for block in np.flatnonzero(filling & ((pool.ref_counts | pool.fence_counts) == 0)).tolist():
        wrong.append(f"block {block} could be reused while a copy fills it")
    for block in np.flatnonzero(filling & pool.indexed).tolist():
        wrong.append(f"block {block} is shared while a copy fills it")
    return wrong


def check_orders(pool: BlockPool) -> list[str]:
    """Whether free list and eviction order hold what the counts say, in whichever tier."""
    wrong: list[str] = []
    if (pool.busy_counts != pool.quarantine_counts + pool.transfer_counts).any():
        wrong.append("quarantines and transfers do not add up")
    idle = (pool.ref_counts | pool.fence_counts | pool.busy_counts) == 0
    idle[0] = False
    free = pool.free.ids()
    if not np.array_equal(np.sort(free), np.flatnonzero(idle & ~pool.indexed)):
        wrong.append("the free list is not the blocks that nothing holds and nothing names")
    if not np.array_equal(np.sort(pool.policy.waiting()), np.flatnonzero(idle & pool.indexed)):
        wrong.append("the eviction order is not the indexed blocks that nothing holds")
    if pool.num_evictable != np.count_nonzero(idle & pool.indexed):
        wrong.append("the number of evictable blocks is wrong")
    wrong.extend(pool.limits.check(idle & pool.indexed))
    for name, number, found in (
        ("referenced", pool.num_referenced, pool.ref_counts),
        ("indexed", pool.num_indexed, pool.indexed),
        ("shared", pool.num_shared, pool.ref_counts - pool.pin_counts > 1),
    ):
        if number != np.count_nonzero(found):
            wrong.append(f"the number of {name} blocks is wrong")
    return wrong


def _check_pins(state: PoolState, owners: list[SessionState]) -> list[str]:
    pins, index = state.pins, state.index
    wrong: list[str] = []
    held = np.concatenate([np.empty(0, np.int32), *(pin.blocks for pin in pins.live())])
    if (pins.counts != np.bincount(held, minlength=state.pool.num_blocks)).any():
        wrong.append("a block has the wrong number of pins")
    if pins.num_blocks != len(set(held.tolist())) or pins.num_blocks > pins.max_blocks:
        wrong.append("the number of pinned blocks is wrong, or above its limit")
    sessions = {owner.session for owner in owners}
    for pin in pins.live():
        if pin.owner not in sessions:
            wrong.append("a pin outlives its session")
        nodes = index.node_of_block[pin.blocks].tolist()
        if 0 in nodes or [index.key_tokens(node)[0] for node in nodes[1:]] != nodes[:-1]:
            wrong.append("a pin keeps what is no cached prefix")
    return wrong


def _check_sequence(state: PoolState, slot: int, row: Int32Array) -> list[str]:
    seqs, pool, index = state.sequences, state.pool, state.index
    name = f"sequence {int(seqs.ids[slot])}"
    blocks = row.tolist()
    wrong: list[str] = []
    held = seqs.held(slot).tolist()
    if len(set(held)) < len(held):
        wrong.append(f"{name} names a block twice")
    num_full = int(seqs.num_committed[slot]) // seqs.block_size
    if seqs.num_published[slot] > num_full:
        wrong.append(f"{name} has published what is not committed")
    parent = int(seqs.roots[slot])
    tokens = seqs.tokens[slot]
    for place in range(int(seqs.num_published[slot])):
        node = int(index.node_of_block[blocks[place]])
        if node == 0:
            wrong.append(f"{name} has a published block without a node")
            break
        above, inside = index.key_tokens(node)
        if above != parent or not np.array_equal(inside, tokens[place * seqs.block_size : (place + 1) * seqs.block_size]):
            wrong.append(f"{name} has a published block under other tokens")
        parent = node
    if parent != seqs.last_nodes[slot]:
        wrong.append(f"{name} does not know its last published node")
    if not seqs.may_copy[slot]:
        tail = row[num_full:]
        if (pool.ref_counts[tail] > 1).any() or pool.indexed[tail].any():
            wrong.append(f"{name} could write a block that has another holder")
    return wrong


def _check_retention(state: PoolState, slot: int, row: Int32Array) -> list[str]:
    """Holes are where sink and window say, neither more nor fewer; what may be shared ends before them."""
    seqs, size = state.sequences, state.sequences.block_size
    name = f"sequence {int(seqs.ids[slot])}"
    sink, window, committed = int(seqs.num_sink[slot]), int(seqs.num_window[slot]), int(seqs.num_committed[slot])
    first, end = -(-sink // size), int(seqs.hole_ends[slot])
    wrong: list[str] = []
    if np.flatnonzero(row == NULL_BLOCK).tolist() != list(range(first, end)) or (end and end <= first):
        wrong.append(f"{name} has other holes than it says")
    if end * size > max(committed - window, 0):
        wrong.append(f"{name} has a hole in its window")
    if window and max(end, first) < (committed - window) // size:
        wrong.append(f"{name} holds a block that is wholly outside its window")
    limit = min((sink + window) // size, first) if end else (sink + window) // size
    if seqs.share_limits[slot] != (min(limit, 2**31 - 1) if window else 2**31 - 1):
        wrong.append(f"{name} shares more or less than its retention allows")
    return wrong
