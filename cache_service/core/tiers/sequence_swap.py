"""Sequences between the tiers: swapped out, swapped in, and started on blocks that only the host tier holds.

Owns the moves under way. Rules: a swap takes all blocks of a sequence or changes nothing. The bytes are dropped last on
either side: a sequence that is swapped out keeps its device blocks until its orders have completed, one that is swapped in
keeps its host blocks until its loads have. Of a swap-out that failed the sequence is back on the device, untouched; of a
swap-in, still in the host tier; of a start, its hit ends before the block that could not be loaded. A sequence changes its
state only in a call of its own session, which is told of it there, so that no session acts on what it does not know.
"""

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..values.types import Executor, Int32Array, Int64Array, SequenceState, SessionId
from .offload import Offloader
from .transfers import Move, TransferOrder

AT_ONCE = 512  # orders, about a millisecond


class SequenceSwapper:
    """Moves the sequences of one pool; a pool without a host tier has none."""

    def __init__(self, state: PoolState, offloader: Offloader) -> None:
        self.offloader = offloader
        self.host = offloader.host
        self.moves: dict[int, Move] = {}  # slot: a swap-out whose device blocks are still held, or a load
        self.arrived: dict[int, list[Move]] = {}  # number of a session: moves to conclude in its next call
        self.at_once = AT_ONCE  # reported orders that are ended with the call that reports them
        self.num_swap_outs = 0
        self.num_swap_ins = 0
        self._sequences = state.sequences
        self._index = state.index
        self._pool = state.pool
        self._blocks_left = state.blocks_left
        self._pin_preemption = state.pin_preemption
        self._claims = state.claims
        self._publisher = state.publisher
        self._retention = state.retention
        self._counters = state.counters
        self._caller: SessionState | None = None
        self._told: list[TransferOrder] = []
        self._num_run = 0  # of them, by this service

    # Calls

    def begin_call(self, owner: SessionState, told: list[TransferOrder]) -> None:
        """A call of the session begins, which will tell the orders. Without one nothing is demoted."""
        self._caller, self._told, self._num_run = owner, told, 0
        self.offloader.begin_call(owner, told)

    def finish_call(self, owner: SessionState) -> None:
        """The call is over."""
        self.run_now(owner)
        self._caller, self._told = None, []
        self.offloader.finish_call()

    def run_now(self, owner: SessionState) -> None:
        """Where the cache service runs the session's orders, they are complete for all that comes next."""
        if owner.executor is Executor.CACHE and self._num_run < len(self._told):
            ids = [order.id for order in self._told[self._num_run :]]
            self._num_run = len(self._told)
            self._end_orders(self.offloader.transfers.take_orders(ids), ok=True)

    def report_orders(self, completed: Int64Array, failed: Int64Array) -> None:
        """Orders have ended, as `Transfers.check_report` has allowed. Of many, a rest is left for `end_reported_orders`."""
        self.offloader.transfers.add_report(completed, failed)
        self.end_reported_orders(self.at_once)

    def end_reported_orders(self, max_orders: int) -> bool:
        """Applies the ends of up to so many reported orders to blocks and sequences. Answers whether any are left."""
        transfers = self.offloader.transfers
        while max_orders > 0 and (reported := transfers.take_reported_orders(max_orders)) is not None:
            orders, ok = reported
            self._end_orders(orders, ok=ok)
            max_orders -= len(orders)
        return transfers.has_reported

    def conclude_arrived(self, owner: SessionState) -> list[int]:
        """Concludes what has arrived for this session. Answers the slots that run from now on."""
        arrived = self.arrived.pop(owner.number, [])
        return [move.slot for move in arrived if not move.is_over and self._conclude(move)]

    # Swapping out

    def copies_of(self, owner: SessionState, slot: int) -> tuple[Int64Array, Int32Array]:
        """Table indices that have a block, and the host copy of each that may be shared, or 0.

        A copy on its way is waited for only where this session makes it: of another's failure it would not be told.
        """
        table = self._sequences.table(slot)
        places = np.flatnonzero(table)
        index = self._index
        hosts = index.host_of_node[index.node_of_block[table[places]]]
        for at in np.flatnonzero(self.host.is_filling[hosts]).tolist():
            if self.offloader.fills[int(hosts[at])].owner is not owner:
                hosts[at] = 0
        for at in np.flatnonzero(hosts == 0).tolist() if self.offloader.outs else ():
            order = self.offloader.outs.get(int(table[places[at]]))
            if order is not None and order.owner is owner:
                hosts[at] = order.destination
        return places, hosts

    def shortage(self, owner: SessionState, slot: int) -> tuple[int, int]:
        """(host blocks that a swap-out would take, those that there are)."""
        _, hosts = self.copies_of(owner, slot)
        return int(np.count_nonzero(hosts == 0)), self.host.pool.num_available - self.host.pool.num_revived(hosts)

    def swap_out(self, owner: SessionState, slot: int) -> bool:
        """Moves a running sequence to the host tier; or answers False and changes nothing."""
        seqs, index, host = self._sequences, self._index, self.host
        num_missing, num_room = self.shortage(owner, slot)
        if num_missing > num_room:
            self._counters.num_refusals += 1
            return False
        table = seqs.table(slot)
        places, hosts = self.copies_of(owner, slot)
        has_copy = hosts > 0
        host.pool.acquire(hosts[has_copy])
        hosts[~has_copy] = host.take_blocks(num_missing, held=True)
        move = self.moves[slot] = Move(slot, owner, SequenceState.SWAPPED)
        for block in hosts[has_copy & host.is_filling[hosts]].tolist():
            self.offloader.fills[block].add_waiter(move, 0)
        blocks, copies = table[places][~has_copy], hosts[~has_copy]
        nodes = index.node_of_block[blocks]  # now: making room in the host tier may have forgotten a node
        named = (nodes > 0) & (index.host_of_node[nodes] == 0)
        index.add_hosts(nodes[named], copies[named])
        host.pool.mark_indexed(copies[named])
        for order in self.offloader.order_swap_outs(blocks, copies):
            order.add_waiter(move, 0)
            self.offloader.outs.setdefault(order.source, order)
        host_table = np.zeros(len(table), np.int32)
        host_table[places] = hosts
        host.tables[slot] = host_table
        seqs.unpublish(slot)
        seqs.swap_out(slot)
        self._claims.forget_claim(slot)
        self.num_swap_outs += 1
        if not move.num_pending:
            self._leave_device(move)
        return True

    def _leave_device(self, move: Move) -> None:
        """All host copies are written: the device blocks are given up."""
        self._end_move(move)
        self._drop_blocks(move.owner, self._sequences.table(move.slot))
        self._sequences.give_up_table(move.slot)

    # Swapping in

    def shortage_in(self, owner: SessionState, slot: int, num_spare: int) -> tuple[int, int]:
        """(device blocks that a swap-in would take, those that there are)."""
        blocks, _ = self._present(owner, slot)
        num_missing = int(np.count_nonzero((blocks == 0) & (self.host.tables[slot] > 0)))
        return num_missing, self._blocks_left.beside(blocks, num_spare)

    def swap_in(self, owner: SessionState, slot: int, num_spare: int) -> bool:
        """Brings a swapped sequence back: it runs if nothing is to be loaded, else it loads. Or False, and nothing changed."""
        seqs = self._sequences
        if seqs.keeps_table[slot]:
            self._return_to_device(self.moves[slot])
            self.num_swap_ins += 1
            return True
        num_missing, num_room = self.shortage_in(owner, slot, num_spare)
        if num_missing > num_room:
            hits, num_short = self._present(owner, slot)[0], num_missing - num_room
            if self._pin_preemption.make_pins_give_way(slot, num_short, hits):
                num_missing, num_room = self.shortage_in(owner, slot, num_spare)
        if num_missing > num_room:
            self._counters.num_refusals += 1
            return False
        blocks, joined = self._present(owner, slot)
        hosts = self.host.tables[slot]
        move = self.moves[slot] = Move(slot, owner, SequenceState.LOADING)
        seqs.begin_load(slot)
        self._load(move, hosts, blocks, joined, np.flatnonzero((blocks == 0) & (hosts > 0)))
        seqs.set_run(slot, 0, blocks)
        if not move.num_pending:
            self._conclude(move)
        return True

    def _present(self, owner: SessionState, slot: int) -> tuple[Int32Array, list[tuple[TransferOrder, int]]]:
        """Device blocks [n] that hold what the sequence's host blocks hold, or are loaded from them just now; else 0."""
        hosts, index = self.host.tables[slot], self._index
        blocks = index.block_of_node[index.node_of_host[hosts]]
        return blocks, self._join(owner, hosts, blocks, any_session=False)

    # Starting

    def join_loads(self, owner: SessionState, nodes: Int32Array, blocks: Int32Array) -> list[tuple[TransferOrder, int]]:
        """Fills in the blocks [n] of nodes that are being loaded; answers the orders, each with its index."""
        return self._join(owner, self._index.host_of_node[nodes], blocks, any_session=True)

    def start_load(
        self, owner: SessionState, slot: int, nodes: Int32Array, blocks: Int32Array, joined: list[tuple[TransferOrder, int]]
    ) -> None:
        """Holds the hit of a start and fills in the blocks [n] that are to be loaded; the sequence is LOADING."""
        hit_len = len(nodes) * self._sequences.block_size
        move = self.moves[slot] = Move(slot, owner, SequenceState.LOADING, hit_len)
        missing = np.flatnonzero(blocks == 0)
        self._load(move, self._index.host_of_node[nodes], blocks, joined, missing)

    def _join(
        self, owner: SessionState, hosts: Int32Array, blocks: Int32Array, *, any_session: bool
    ) -> list[tuple[TransferOrder, int]]:
        """Only a start may wait for a load that another session runs: if the load fails, the hit is merely shorter."""
        joined: list[tuple[TransferOrder, int]] = []
        if self.offloader.loads:
            any_session &= owner.executor is Executor.ENGINE  # a session that is answered at once waits for no other
            for at in np.flatnonzero((blocks == 0) & (hosts > 0)).tolist():
                order = self.offloader.loads.get(int(hosts[at]))
                if order is not None and (any_session or order.owner is owner):
                    blocks[at] = order.destination
                    joined.append((order, at))
        return joined

    def _load(
        self, move: Move, hosts: Int32Array, blocks: Int32Array, joined: list[tuple[TransferOrder, int]], missing: Int64Array
    ) -> None:
        """Holds blocks [n] of a table to come, and fills in and orders the missing ones from hosts [n]."""
        self._pool.acquire(blocks[blocks > 0])
        for order, at in joined:
            order.add_waiter(move, at)
        if len(missing):
            root = int(self._sequences.roots[move.slot])
            blocks[missing], orders = self.offloader.order_loads(hosts[missing], root)
            for order, at in zip(orders, missing.tolist(), strict=True):
                order.add_waiter(move, at)

    # Ends

    def release_sequence(self, owner: SessionState, slot: int) -> None:
        """A sequence that is swapped or loading ends. Transfers in flight for it go on, and are for no sequence."""
        seqs = self._sequences
        if seqs.keeps_table[slot] or seqs.states[slot] == SequenceState.LOADING:
            self._drop_blocks(owner, seqs.table(slot))
            seqs.give_up_table(slot)
        if slot in self.moves:
            self._end_move(self.moves[slot])
        if slot in self.host.tables:
            self.host.drop_table(slot)

    def end_session(self, owner: SessionState, *, may_still_write: bool) -> Int32Array:
        """After its sequences were released: its orders have failed, for all that wait. Answers blocks in quarantine."""
        self.end_reported_orders(self.offloader.transfers.num_issued)  # what was run before it ended was run
        self.arrived.pop(owner.number, None)
        blocks, orders = self.offloader.end_session(owner, may_still_write=may_still_write)
        self._tell_waiters(orders, ok=False)
        return blocks

    def end_quarantine(self, session: SessionId) -> None:
        self.host.end_quarantine(session)

    def _end_orders(self, orders: list[TransferOrder], *, ok: bool) -> None:
        self.offloader.end_orders(orders, ok=ok)
        self._tell_waiters(orders, ok=ok)

    def _tell_waiters(self, orders: list[TransferOrder], *, ok: bool) -> None:
        for order in orders:
            for move, table_idx in order.waiters:
                move.num_pending -= 1
                if move.is_over:
                    continue
                had_failed = move.failed_idx is not None
                if not ok:
                    move.failed_idx = table_idx if move.failed_idx is None else min(table_idx, move.failed_idx)
                is_out = move.towards == SequenceState.SWAPPED
                if (is_out and not ok and not had_failed) or (not move.num_pending and not is_out):
                    self.arrived.setdefault(move.owner.number, []).append(move)
                elif not move.num_pending and move.failed_idx is None:
                    self._leave_device(move)

    def _conclude(self, move: Move) -> bool:
        """All orders of the move have ended, or one has failed. Answers whether the sequence runs now."""
        seqs, slot = self._sequences, move.slot
        if move.towards == SequenceState.SWAPPED:
            self._return_to_device(move)
            return True
        self._end_move(move)
        if move.hit_len is None:
            if move.failed_idx is not None:
                self._drop_blocks(move.owner, seqs.table(slot))
                seqs.fail_load(slot)
                return False
            self.host.drop_table(slot)
            self.num_swap_ins += 1
            self._run(move)
            return True
        hit_len = move.hit_len
        if move.failed_idx is not None:
            hit_len = move.failed_idx * seqs.block_size
            self._drop_blocks(move.owner, seqs.table(slot)[move.failed_idx :])
            seqs.trim_reserved(slot, hit_len)
        seqs.end_load(slot, hit_len, move.owner.step_id)
        self._counters.num_hits += hit_len > 0
        self._counters.num_hit_tokens += hit_len
        self._run(move)
        return True

    def _return_to_device(self, move: Move) -> None:
        """A sequence that still has its device blocks runs on them again."""
        self._end_move(move)
        self.host.drop_table(move.slot)
        self._run(move)

    def _run(self, move: Move) -> None:
        seqs = self._sequences
        seqs.run(move.slot)
        self._publisher.publish_again(move.owner, move.slot)
        if seqs.num_retaining:  # what was committed meanwhile may have moved its window
            self._retention.drop_outside(move.owner, np.array([move.slot]), told_now=True)

    def _end_move(self, move: Move) -> None:
        """From now on the device blocks of a swap-out may be written, so that its copies are shared no more."""
        move.is_over = True
        del self.moves[move.slot]
        if self.offloader.outs and move.towards == SequenceState.SWAPPED:
            for block in self._sequences.table(move.slot).tolist():
                self.offloader.outs.pop(block, None)

    def _drop_blocks(self, owner: SessionState, table: Int32Array) -> None:
        """Gives up device blocks, deepest first; in a step of the session, that step does not touch them any more."""
        owner.drop_blocks(self._pool, table[table > 0][::-1], until=owner.step_id - (owner is self._caller))
