"""The audit of the host tier and of what is in flight between the tiers; the rest of a pool is invariants.py's.

Recomputes every derived number and every look-up table from the orders in flight, the tables of swapped sequences and the
index. Raises nothing and changes nothing.
"""

from collections.abc import Iterator

import numpy as np

from ..pool_state import PoolState
from ..tiers.sequence_swap import SequenceSwapper
from ..tiers.transfers import Move
from ..values.types import NO_INT32, Int32Array, SequenceState, TransferKind
from .order_invariants import check_orders


def audit(state: PoolState, swapper: SequenceSwapper) -> Iterator[list[str]]:
    """In slices, one sentence per violation; the pool may change between two slices."""
    yield _check_blocks(state, swapper)
    for wrong in check_orders(swapper.host.pool):
        yield [f"in the host tier {text}" for text in wrong]
    yield _check_orders(swapper)
    yield _check_moves(state, swapper)
    if state.below is not None:
        yield state.below.check()


def _check_blocks(state: PoolState, swapper: SequenceSwapper) -> list[str]:
    host, transfers = swapper.host, swapper.offloader.transfers
    out_sources, out_destinations = transfers.ends(TransferKind.SWAP_OUT)
    in_sources, in_destinations = transfers.ends(TransferKind.SWAP_IN)
    held = [table[table > 0] for table in host.tables.values()]
    lower_ends, lower_fills = state.below.host_ends() if state.below is not None else (NO_INT32, NO_INT32)
    wrong: list[str] = []
    for name, counts, entries in (
        ("transfers", state.pool.transfer_counts, [out_sources, in_destinations]),
        ("host references", host.pool.ref_counts, held),
        ("host transfers", host.pool.transfer_counts, [in_sources, out_destinations, lower_ends]),
        ("host quarantines", host.pool.quarantine_counts, host.quarantined_blocks()),
        ("orders that fill it", host.is_filling.astype(np.int32), [out_destinations, lower_fills]),
    ):
        differ = np.flatnonzero(counts != _count(entries, len(counts)))
        wrong.extend(f"block {block} has the wrong number of {name}" for block in differ.tolist())
    if (host.pool.indexed != (state.index.node_of_host > 0)).any():
        wrong.append("host tier and index disagree on what is indexed")
    kept = state.index.record.hosts if state.index.record is not None else None
    if kept is not None and (kept.table.has_rows() & host.is_filling).any():
        wrong.append("a host block is written down while an order fills it")
    if host.pool.num_referenced != np.count_nonzero(host.pool.ref_counts) or host.pool.fence_counts.any():
        wrong.append("the number of held host blocks is wrong")
    return wrong


def _check_orders(swapper: SequenceSwapper) -> list[str]:
    offloader = swapper.offloader
    in_flight = offloader.transfers.in_flight
    wrong = [f"order {number} does not know its id" for number, order in in_flight.items() if order.id != number]
    fills = {order.destination: order for order in in_flight.values() if order.kind is TransferKind.SWAP_OUT}
    if not offloader.transfers.are_by_owner():
        wrong.append("the orders of the sessions are not those in flight")
    if fills != offloader.fills:
        wrong.append("the orders that fill host blocks are not those in flight")
    for known, kind in ((offloader.loads, TransferKind.SWAP_IN), (offloader.outs, TransferKind.SWAP_OUT)):
        for block, order in known.items():
            if order.source != block or order.kind is not kind or in_flight.get(order.id) is not order:
                wrong.append(f"order {order.id} is looked up by a block that it does not read")
    return wrong


def _check_moves(state: PoolState, swapper: SequenceSwapper) -> list[str]:
    seqs, offloader = state.sequences, swapper.offloader
    wrong: list[str] = []
    pending: dict[int, int] = {}
    for order in offloader.transfers.in_flight.values():
        for waiter, _ in order.waiters:
            pending[id(waiter)] = pending.get(id(waiter), 0) + 1
    arrived = {id(waiter) for moves in swapper.arrived.values() for waiter in moves}
    for slot in seqs.live_slots().tolist():
        sequence_state, name = int(seqs.states[slot]), f"sequence {int(seqs.ids[slot])}"
        move = swapper.moves.get(slot)
        is_loading = sequence_state == SequenceState.LOADING
        if bool(seqs.keeps_table[slot]) != (move is not None and move.towards == SequenceState.SWAPPED):
            wrong.append(f"{name} keeps its device blocks for no swap-out")
        if is_loading != (move is not None and move.towards == SequenceState.LOADING):
            wrong.append(f"{name} and its move disagree on its state")
        if (slot in swapper.host.tables) != (sequence_state == SequenceState.SWAPPED or (is_loading and _is_swap_in(move))):
            wrong.append(f"{name} has host blocks that it should not have, or none")
        if move is not None:
            if move.num_pending != pending.get(id(move), 0) or move.is_over:
                wrong.append(f"{name} waits for the wrong number of orders")
            if not move.num_pending and id(move) not in arrived:
                wrong.append(f"{name} waits for nothing")
        num_entries = seqs.num_blocks(int(seqs.num_reserved[slot])) * seqs.num_groups
        if slot in swapper.host.tables and len(swapper.host.tables[slot]) != num_entries:
            wrong.append(f"{name} has the wrong number of host blocks")
    if any(seqs.states[slot] == SequenceState.FREE_SLOT for slot in (*swapper.moves, *swapper.host.tables)):
        wrong.append("a sequence that was released is still being moved")
    return wrong


def _is_swap_in(move: Move | None) -> bool:
    return move is not None and move.hit_len is None


def _count(entries: list[Int32Array], size: int) -> Int32Array:
    return np.bincount(np.concatenate([np.empty(0, np.int32), *entries]), minlength=size).astype(np.int32)
