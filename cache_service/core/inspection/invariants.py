"""The whole audit of one pool: what rules R1, R2 and R5 say about its state, recomputed from scratch.

Compares every derived number with what it is derived from. Runs after each step in tests and on demand in production; it
raises nothing and changes nothing. Texts name blocks and sequences by number only.
"""

from collections.abc import Iterator

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..values.distinct import distinct, has_repeats
from ..values.types import NO_INT32, NULL_BLOCK, Int32Array, SequenceState
from .order_invariants import check_orders, wrong_number
from .slices import compare

_SLICE_PLACES = 256  # published blocks compared in about a millisecond


def audit(state: PoolState) -> Iterator[list[str]]:
    """In slices of a millisecond or a few, one sentence per violation; the pool may change between two slices.

    Each slice reports the state of the moment when it is asked for, and all of it must hold between any two calls.
    """
    for check in (_check_counters, _check_names):
        wrong = check(state)
        yield wrong
        if wrong:
            return  # tables cannot be read by wrong counters or numbers
    yield from _check_references(state)
    yield from _check_fences(state)
    yield from _check_quarantines(state)
    for check in (_check_index, _check_copies, _check_counts):
        yield check(state)
    yield _check_misses(state)
    yield from check_orders(state.pool)
    yield from state.index.check()
    yield _check_pins(state)
    yield state.publisher.check()
    yield state.claims.check()
    for slot in state.sequences.running_slots().tolist():
        if _is_running(state, slot):  # it may have ended since
            yield _check_sequence(state, slot) + _check_retention(state, slot) + _check_groups(state, slot)
            yield from _check_published(state, slot)


def _owners(state: PoolState) -> list[SessionState]:
    return [*state.sessions.values(), *state.ended_sessions]


def _named(state: PoolState) -> list[Int32Array]:
    """Every entry of a table or a pin."""
    seqs = state.sequences
    has_blocks = (seqs.states == SequenceState.RUNNING) | (seqs.states == SequenceState.LOADING) | seqs.keeps_table
    return [*map(seqs.tables.held, np.flatnonzero(has_blocks).tolist()), *(pin.blocks for pin in state.pins.live())]


def _check_counters(state: PoolState) -> list[str]:
    seqs, owners = state.sequences, _owners(state)
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
    if seqs.num_active != np.count_nonzero(np.isin(seqs.states, (SequenceState.RUNNING, SequenceState.LOADING))):
        wrong.append("the number of active sequences is wrong")
    if seqs.tokens.waiting_slots != set(np.flatnonzero(seqs.states == SequenceState.WAITING).tolist()):
        wrong.append("prompts are kept of others than the sequences that wait")
    if seqs.num_free_slots + len(live) != len(seqs.ids):
        wrong.append("free and used sequence slots do not add up")
    return wrong


def _check_misses(state: PoolState) -> list[str]:
    num_missed = state.counters.num_look_up_tokens - state.counters.num_hit_tokens
    return wrong_number("missed tokens", state.misses.num_tokens(), num_missed)


def _check_names(state: PoolState) -> list[str]:
    named = np.concatenate([NO_INT32, *_named(state)])
    if len(named) and (int(named.min()) < 1 or int(named.max()) >= state.pool.num_blocks):
        return ["a block table or a pin names a block that is not there"]
    return []


def _check_references(state: PoolState) -> Iterator[list[str]]:
    counts = state.pool.ref_counts
    yield from compare("references", len(counts), lambda some: counts[some], lambda: _named(state))


def _check_fences(state: PoolState) -> Iterator[list[str]]:
    counts = state.pool.fence_counts
    yield from compare(
        "fences", len(counts), lambda some: counts[some], lambda: [owner.fenced_blocks() for owner in _owners(state)]
    )


def _check_quarantines(state: PoolState) -> Iterator[list[str]]:
    counts = state.pool.quarantine_counts
    yield from compare("quarantines", len(counts), lambda some: counts[some], lambda: list(state.quarantines.values()))


def _check_index(state: PoolState) -> list[str]:
    is_partial, wrong = state.index.partials.is_named, list[str]()
    if (state.pool.indexed != ((state.index.node_of_block > 0) | is_partial)).any():
        wrong.append("pool and index disagree on what is indexed")
    if (is_partial & ((state.pool.ref_counts > 0) | (state.index.node_of_block > 0))).any():
        wrong.append("a block of a partial node is in a table, or another node's, too")
    return wrong


def _check_counts(state: PoolState) -> list[str]:
    pool = state.pool
    blocks = np.flatnonzero((pool.fence_counts | pool.busy_counts) > 0)
    blocks = blocks[pool.ref_counts[blocks] == 0]
    is_quarantined, is_moving = pool.quarantine_counts[blocks] > 0, pool.transfer_counts[blocks] > 0
    wrong: list[str] = []
    for name, number, found in (
        ("quarantined", pool.num_quarantined, is_quarantined),
        ("moving", pool.num_in_transfer, is_moving & ~is_quarantined),
        ("fenced", pool.num_fenced, ~is_quarantined & ~is_moving),
    ):
        wrong += wrong_number(name, number, int(np.count_nonzero(found)))
    return wrong


def _check_copies(state: PoolState) -> list[str]:
    """A block that a copy in flight fills is held until the copy has run, and is not shared."""
    pool = state.pool
    filling = distinct(np.concatenate([NO_INT32, *(owner.filling_blocks() for owner in _owners(state))]))
    wrong: list[str] = []
    if not np.array_equal(filling, np.flatnonzero(pool.is_filling)):
        wrong.append("the blocks that copies fill are not those of the copies in flight")
    for block in filling[(pool.ref_counts[filling] | pool.fence_counts[filling]) == 0].tolist():
        wrong.append(f"block {block} could be reused while a copy fills it")
    for block in filling[pool.indexed[filling]].tolist():
        wrong.append(f"block {block} is shared while a copy fills it")
    return wrong


def _check_pins(state: PoolState) -> list[str]:
    pins, index = state.pins, state.index
    wrong: list[str] = []
    held, counts = np.unique(np.concatenate([NO_INT32, *(pin.blocks for pin in pins.live())]), return_counts=True)
    if not np.array_equal(held, np.flatnonzero(pins.counts)) or (pins.counts[held] != counts).any():
        wrong.append("a block has the wrong number of pins")
    if pins.num_blocks != len(held) or pins.num_blocks > pins.max_blocks:
        wrong.append("the number of pinned blocks is wrong, or above its limit")
    limits, own = state.pool.limits, {(pin.tenant, block) for pin in pins.live() for block in pin.blocks.tolist()}
    if limits.has_quotas and not np.array_equal(
        limits.pinned, np.bincount([-tenant for tenant, _ in own], minlength=len(limits.pinned))
    ):
        wrong.append("a tenant has the wrong number of pinned blocks")
    sessions = {owner.session for owner in _owners(state)}
    for pin in pins.live():
        if pin.owner not in sessions:
            wrong.append("a pin outlives its session")
        nodes = index.node_of_block[pin.blocks].tolist()
        path, others = nodes[: pin.num_entries], nodes[pin.num_entries :]
        is_path = 0 not in path and [index.key_tokens(node)[0] for node in path[1:]] == path[:-1]
        if not is_path or not set(path).issuperset(others):
            wrong.append("a pin keeps what is no cached prefix")
    return wrong


def _is_running(state: PoolState, slot: int) -> bool:
    return bool(state.sequences.states[slot] == SequenceState.RUNNING)


def _check_sequence(state: PoolState, slot: int) -> list[str]:
    seqs, pool, index = state.sequences, state.pool, state.index
    name, row = f"sequence {int(seqs.ids[slot])}", seqs.tables.get(slot)
    wrong: list[str] = []
    if has_repeats(seqs.tables.held(slot)):
        wrong.append(f"{name} names a block twice")
    num_full = int(seqs.num_committed[slot]) // seqs.block_size
    if seqs.num_published[slot] > num_full:
        wrong.append(f"{name} has published what is not committed")
    num_published = int(seqs.num_published[slot])
    last = int(index.node_of_block[row[num_published - 1]]) if num_published else int(seqs.roots[slot])
    if last != seqs.last_nodes[slot]:
        wrong.append(f"{name} does not know its last published node")
    if not seqs.may_copy[slot]:
        tail = seqs.tables.get_from(slot, num_full)
        tail = tail[tail != NULL_BLOCK]
        if (pool.ref_counts[tail] > 1).any() or pool.indexed[tail].any():
            wrong.append(f"{name} could write a block that has another holder")
    return wrong


def _check_published(state: PoolState, slot: int) -> Iterator[list[str]]:
    """In slices; the sequence may change between two of them, so each compares neighbours in the table as it is then."""
    seqs, index, start = state.sequences, state.index, 0
    while _is_running(state, slot) and start < seqs.num_published[slot]:
        name, end = f"sequence {int(seqs.ids[slot])}", min(start + _SLICE_PLACES, int(seqs.num_published[slot]))
        above = index.node_of_block[seqs.tables.rows[slot, start - 1]] if start else seqs.roots[slot]
        nodes = [int(above), *index.node_of_block[seqs.tables.rows[slot, start:end]].tolist()]
        tokens = seqs.tokens.all[slot, start * seqs.block_size : end * seqs.block_size].reshape(-1, seqs.block_size)
        wrong: list[str] = []
        for parent, node, inside in zip(nodes, nodes[1:], tokens, strict=False):
            if node == 0:
                wrong.append(f"{name} has a published block without a node")
                break
            key = index.key_tokens(node)
            if key[0] != parent or not np.array_equal(key[1], inside):
                wrong.append(f"{name} has a published block under other tokens")
        yield wrong
        start = end


def _check_retention(state: PoolState, slot: int) -> list[str]:
    """Holes are where sink and window say, neither more nor fewer; what may be shared ends before them."""
    seqs, size = state.sequences, state.sequences.block_size
    row = seqs.tables.get(slot)
    name = f"sequence {int(seqs.ids[slot])}"
    sink, window, committed = int(seqs.num_sink[slot]), int(seqs.num_window[slot]), int(seqs.num_committed[slot])
    first, end = -(-sink // size), int(seqs.tables.hole_ends[slot, 0])
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


def _check_groups(state: PoolState, slot: int) -> list[str]:
    """The holes of each group end where its window begins, and what the index names of its table is named by its group."""
    seqs, index, wrong = state.sequences, state.index, list[str]()
    name, committed = f"sequence {int(seqs.ids[slot])}", int(seqs.num_committed[slot])
    for group in seqs.new_entries.state_groups:
        wrong += _check_states(state, slot, group)
    for group in seqs.new_entries.window_groups:
        row, end = seqs.tables.get(slot, group), int(seqs.tables.hole_ends[slot, group])
        start = seqs.group_spans[group].first(committed) // seqs.block_size
        if np.flatnonzero(row == NULL_BLOCK).tolist() != list(range(end)):
            wrong.append(f"{name} has other holes in group {group} than it says")
        if end > start and not seqs.has_tail:
            wrong.append(f"{name} has a hole in its window of group {group}")
        if end < start:
            wrong.append(f"{name} holds a block of group {group} that its window has left behind")
        num_published = int(seqs.num_published[slot])
        nodes, held = index.node_of_block[seqs.tables.get(slot)[end:num_published]], row[end:num_published]
        nodes, held = nodes[state.pool.indexed[held]], held[state.pool.indexed[held]]
        if (index.node_of_block[held] != nodes).any() or (index.held.group_of_block[held] != group).any():
            wrong.append(f"{name} has a block of group {group} under other tokens")
    return wrong


def _check_states(state: PoolState, slot: int, group: int) -> list[str]:
    """The entries that a group of states must and may have; what the index names of them is of their nodes."""
    seqs, index, wrong, size = state.sequences, state.index, list[str](), state.sequences.block_size
    name, committed, reserved = f"sequence {int(seqs.ids[slot])}", int(seqs.num_committed[slot]), int(seqs.num_reserved[slot])
    row, places = seqs.tables.get(slot, group), np.arange(seqs.num_blocks(reserved), dtype=np.int32)
    read, end = seqs.group_spans[group].first(committed) // size, int(seqs.tables.hole_ends[slot, group])
    is_checkpoint = seqs.new_entries.are_checkpoints(group, places)
    if end != min(read, len(row)):
        wrong.append(f"{name} has looked at other entries of group {group} than its tokens have passed")
    if row[places[(places < read) & ~is_checkpoint]].any():
        wrong.append(f"{name} holds a state of group {group} that its tokens have passed")
    lasts = [(length - 1) // size for length in (committed, reserved) if length]
    if not row[lasts].all():
        wrong.append(f"{name} has no place for a state of group {group} behind its last token")
    if not row[places[(places > read) & is_checkpoint]].all():
        wrong.append(f"{name} has no place for a checkpoint of group {group} that is to come")
    held = row.nonzero()[0]
    held = held[state.pool.indexed[row[held]]]
    nodes = index.node_of_block[seqs.tables.get(slot)[held]]
    is_known = (index.node_of_block[row[held]] == nodes) & (index.held.group_of_block[row[held]] == group)
    published = held < seqs.num_published[slot]
    if not is_known[published].all() or (held >= committed // size).any():
        wrong.append(f"{name} has a state of group {group} that is cached as another")
    return wrong
