"""Sequences between the tiers: swapped out, swapped in, and started on blocks that only the host tier holds.

Owns the moves under way. Rules: a swap takes all blocks of a sequence or changes nothing. The bytes are dropped last on either
side: a sequence that is swapped out keeps its device blocks until its orders have completed, one that is swapped in keeps its
host blocks until its loads have. Of a swap-out that failed the sequence is back on the device, untouched; of a swap-in, still
in the host tier; of a start, its hit ends where each group of layers has what the next token reads. Tables of several groups
are moved as one, one behind the other, and their holes stay holes; so a tail comes back as it was. A sequence changes its state
only in a call of its own session, which learns of it there, so that no session acts on what it does not know.
"""

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..sequences.spans import can_leave
from ..values.types import Executor, Int32Array, Int64Array, SequenceState
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
        self._spans = state.spans
        self._counters = state.counters
        self._misses = state.misses
        self._caller: SessionState | None = None
        self._issued: list[TransferOrder] = []
        self._num_run = 0  # of them, by this service

    # Calls

    def begin_call(self, owner: SessionState, issued: list[TransferOrder], *, is_asked: bool = False) -> None:
        """A call of the session begins, which will list the orders; is_asked: it is there to demote. Without one nothing is."""
        self._caller, self._issued, self._num_run = owner, issued, 0
        self.offloader.begin_call(owner, issued, is_asked=is_asked)

    def finish_call(self, owner: SessionState) -> None:
        """The call is over."""
        self.run_now(owner)
        self._caller, self._issued = None, []
        self.offloader.finish_call()

    def run_now(self, owner: SessionState) -> None:
        """Where the cache service runs the session's orders, they are complete for all that comes next."""
        if owner.executor is Executor.CACHE and self._num_run < len(self._issued):
            ids = [order.id for order in self._issued[self._num_run :]]
            self._num_run = len(self._issued)
            self._end_orders(self.offloader.transfers.take_orders(ids), ok=True)

    def report_orders(self, completed: Int64Array, failed: Int64Array) -> None:
        """Orders have ended, as `Transfers.check_report` has allowed. Of many, a rest is left for `end_reported_orders`."""
        self.offloader.transfers.add_report(completed, failed)
        self.end_reported_orders(self.at_once)

    def end_reported_orders(self, max_orders: int) -> bool:
        """Applies the ends of up to so many reported orders to blocks and sequences. Returns whether any are left."""
        transfers = self.offloader.transfers
        while max_orders > 0 and (reported := transfers.take_reported_orders(max_orders)) is not None:
            orders, ok = reported
            self._end_orders(orders, ok=ok)
            max_orders -= len(orders)
        return transfers.has_reported

    def conclude_arrived(self, owner: SessionState) -> list[int]:
        """Concludes what has arrived for this session. Returns the slots that run from now on."""
        arrived = self.arrived.pop(owner.number, [])
        return [move.slot for move in arrived if not move.is_over and self._conclude(move)]

    # Swapping out

    def find_copies(self, owner: SessionState, slot: int) -> tuple[Int64Array, Int32Array]:
        """Places in the tables that have a block, and the host copy of each that may be shared, or 0.

        A copy on its way is waited for only where this session makes it: it would not hear of another's failure.
        """
        table = self._sequences.tables.get_from(slot, 0)
        places = np.flatnonzero(table)
        hosts = self._index.held.find_hosts(table[places])
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
        _, hosts = self.find_copies(owner, slot)
        return int(np.count_nonzero(hosts == 0)), self.host.pool.num_available - self.host.pool.num_revived(hosts)

    def swap_out(self, owner: SessionState, slot: int) -> bool:
        """Moves a running sequence to the host tier; or returns False and changes nothing."""
        seqs, index, host = self._sequences, self._index, self.host
        num_missing, num_room = self.shortage(owner, slot)
        if num_missing > num_room or not can_leave(seqs, slot):
            self._counters.num_refusals += 1
            return False
        table = seqs.tables.get_from(slot, 0)
        places, hosts = self.find_copies(owner, slot)
        has_copy = hosts > 0
        host.pool.acquire(hosts[has_copy])
        hosts[~has_copy] = host.take_blocks(num_missing, held=True)
        move = self.moves[slot] = Move(slot, owner, SequenceState.SWAPPED)
        for block in hosts[has_copy & host.is_filling[hosts]].tolist():
            self.offloader.fills[block].add_waiter(move, 0)
        blocks, copies = table[places][~has_copy], hosts[~has_copy]
        nodes = index.node_of_block[blocks]  # now: making room in the host tier may have forgotten a node
        named = (nodes > 0) & (index.held.find_hosts(blocks) == 0)
        if index.held.has_tail:  # its pages are this sequence's alone there, because hits do without them
            named &= index.held.group_of_block[blocks] == 0
        index.add_hosts(nodes[named], copies[named], index.held.get_groups(blocks[named]))
        host.pool.mark_indexed(copies[named])
        for order in self.offloader.prepare_store(blocks, copies):
            order.add_waiter(move, 0)
            self.offloader.outs.setdefault(order.source, order)
        host_table = np.zeros(len(table), np.int32)
        host_table[places] = hosts
        host.tables[slot] = host_table
        seqs.unpublish(slot)
        seqs.swap_out(slot, keeps_table=True)
        self._claims.forget_claim(slot)
        self.num_swap_outs += 1
        if not move.num_pending:
            self._leave_device(move)
        return True

    def _leave_device(self, move: Move) -> None:
        """All host copies are written: the device blocks are given up."""
        self._end_move(move)
        self._drop_blocks(move.owner, self._sequences.tables.leaves_first(move.slot))
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
        seqs.tables.place_whole(slot, blocks)
        if not move.num_pending:
            self._conclude(move)
        return True

    def _present(self, owner: SessionState, slot: int) -> tuple[Int32Array, list[tuple[TransferOrder, int]]]:
        """Device blocks [n] that hold what the sequence's host blocks hold, or are loaded from them just now; else 0."""
        hosts = self.host.tables[slot]
        blocks = self._index.held.find_blocks(hosts)
        return blocks, self._join(owner, hosts, blocks, any_session=False)

    # Starting

    def join_loads(self, owner: SessionState, hosts: Int32Array, blocks: Int32Array) -> list[tuple[TransferOrder, int]]:
        """Fills in the blocks [n] that are being loaded from host copies [n]; returns the orders, each with its place."""
        return self._join(owner, hosts, blocks, any_session=True)

    def start_load(
        self, owner: SessionState, slot: int, hosts: Int32Array, blocks: Int32Array, joined: list[tuple[TransferOrder, int]]
    ) -> None:
        """Holds the hit of a start, the tables [groups * n] of which are given; the sequence is LOADING.

        Fills in the blocks that are to be loaded: those that are 0 and have a host copy.
        """
        seqs = self._sequences
        hit_len = len(blocks) // seqs.num_groups * seqs.block_size
        move = self.moves[slot] = Move(slot, owner, SequenceState.LOADING, hit_len)
        self._load(move, hosts, blocks, joined, np.flatnonzero((blocks == 0) & (hosts > 0)))

    def _join(
        self, owner: SessionState, hosts: Int32Array, blocks: Int32Array, *, any_session: bool
    ) -> list[tuple[TransferOrder, int]]:
        """Only a start may wait for a load that another session runs: if the load fails, the hit is merely shorter."""
        joined: list[tuple[TransferOrder, int]] = []
        if self.offloader.loads:
            any_session &= owner.executor is Executor.ENGINE  # a session that gets its reply at once waits for no other
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
            tenant = int(self._sequences.tenants[move.slot])
            blocks[missing], orders = self.offloader.prepare_load(hosts[missing], tenant)
            for order, at in zip(orders, missing.tolist(), strict=True):
                order.add_waiter(move, at)

    # Ends

    def release_sequence(self, owner: SessionState, slot: int) -> None:
        """A sequence that is swapped or loading ends. Transfers in flight for it go on, and are for no sequence."""
        seqs = self._sequences
        if seqs.keeps_table[slot] or seqs.states[slot] == SequenceState.LOADING:
            self._drop_blocks(owner, seqs.tables.leaves_first(slot))
            seqs.give_up_table(slot)
        if slot in self.moves:
            move = self.moves[slot]
            if move.hit_len is not None:
                self._misses.end_load(int(seqs.tenants[slot]), move.hit_len, 0)
            self._end_move(move)
        if slot in self.host.tables:
            self.host.drop_table(slot)

    def end_session(self, owner: SessionState, *, may_still_write: bool) -> Int32Array:
        """After its sequences were released: its orders have failed, for all that wait. Returns blocks in quarantine."""
        self.end_reported_orders(self.offloader.transfers.num_issued)  # what was run before it ended was run
        self.arrived.pop(owner.number, None)
        blocks, orders = self.offloader.end_session(owner, may_still_write=may_still_write)
        self._notify_waiters(orders, ok=False)
        return blocks

    def _end_orders(self, orders: list[TransferOrder], *, ok: bool) -> None:
        self.offloader.end_orders(orders, ok=ok)
        self._notify_waiters(orders, ok=ok)

    def _notify_waiters(self, orders: list[TransferOrder], *, ok: bool) -> None:
        for order in orders:
            for move, place in order.waiters:
                move.num_pending -= 1
                if move.is_over:
                    continue
                had_failed = bool(move.failed)
                if not ok:
                    move.failed.append(place)
                is_out = move.towards == SequenceState.SWAPPED
                if (is_out and not ok and not had_failed) or (not move.num_pending and not is_out):
                    self.arrived.setdefault(move.owner.number, []).append(move)
                elif not move.num_pending and not move.failed:
                    self._leave_device(move)

    def _conclude(self, move: Move) -> bool:
        """All orders of the move have ended, or one has failed. Returns whether the sequence runs now."""
        seqs, slot = self._sequences, move.slot
        if move.towards == SequenceState.SWAPPED:
            self._return_to_device(move)
            return True
        self._end_move(move)
        if move.hit_len is None:
            if move.failed:
                self._drop_blocks(move.owner, seqs.tables.leaves_first(slot))
                seqs.swap_out(slot, keeps_table=False)
                return False
            self.host.drop_table(slot)
            self.num_swap_ins += 1
            self._run(move)
            return True
        hit_len = move.hit_len
        if move.failed:
            num_left = self._num_left(slot, hit_len // seqs.block_size, move.failed)
            hit_len = num_left * seqs.block_size
            behind = [seqs.tables.get(slot, group)[num_left:][::-1] for group in range(seqs.num_groups)]
            self._drop_blocks(move.owner, np.concatenate(behind))
            seqs.cut_hit(slot, hit_len)
        seqs.end_load(slot, hit_len, move.owner.step_id)
        self._misses.end_load(int(seqs.tenants[slot]), move.hit_len, hit_len)
        self._counters.num_hits += hit_len > 0
        self._counters.num_hit_tokens += hit_len
        self._run(move)
        return True

    def _num_left(self, slot: int, num_hits: int, failed: list[int]) -> int:
        """How many of the first entries of a hit can be started on without the places that failed."""
        seqs = self._sequences
        there = np.array([seqs.tables.get(slot, group)[:num_hits] > 0 for group in range(seqs.num_groups)])
        there.ravel()[failed] = False
        num_first = num_hits if there[0].all() else int(np.argmin(there[0]))
        if seqs.num_groups == 1 or seqs.has_tail:
            return num_first
        return self._index.held.longest_whole(list(there[1:, :num_first]))

    def _return_to_device(self, move: Move) -> None:
        """A sequence that still has its device blocks runs on them again."""
        self._end_move(move)
        self.host.drop_table(move.slot)
        self._run(move)

    def _run(self, move: Move) -> None:
        seqs = self._sequences
        seqs.run(move.slot)
        self._publisher.publish_again(move.owner, move.slot)
        if seqs.may_have_holes:  # what was committed meanwhile may have moved its windows
            self._spans.drop_outside(move.owner, np.array([move.slot]))

    def _end_move(self, move: Move) -> None:
        """From now on the device blocks of a swap-out may be written, so that its copies are shared no more."""
        move.is_over = True
        del self.moves[move.slot]
        if self.offloader.outs and move.towards == SequenceState.SWAPPED:
            for block in self._sequences.tables.get_from(move.slot, 0).tolist():
                self.offloader.outs.pop(block, None)

    def _drop_blocks(self, owner: SessionState, blocks: Int32Array) -> None:
        """Gives up device blocks, the deepest first; in a step of the session, that step does not touch them any more."""
        owner.drop_blocks(self._pool, blocks[blocks > 0], until=owner.step_id - (owner is self._caller))
