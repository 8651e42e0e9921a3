"""Offloader: the effect of orders between the device and the host tier on blocks and on the index.

Owns issuing and ending them: copies to the host for sequences that are swapped out and for cached blocks that are evicted
(demotion), loads for sequences that come back and for hits (promotion). Rules: both ends of an order in flight are kept from
reuse in both tiers until it ends; a host copy counts from its completion on, and a device block is its node's from then on;
an order that fails leaves no copy, and what only that copy held is forgotten. Orders of one session run in the order of their
issue, before the copies and writes of the step that brought them: so a victim may be granted in that very step. Knows sequences
only by the moves that wait.
"""

from collections.abc import Callable

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..values.types import NO_INT32, Int32Array, MatchEnd, TransferKind
from .admission import HostAdmission
from .host_tier import HostTier
from .transfers import TransferOrder, Transfers


class Offloader:
    """The tier below the device of one pool."""

    def __init__(self, state: PoolState) -> None:
        self.host = HostTier(state.config, state.index, self._forget_hosts)
        self.transfers = Transfers()
        self.admission = HostAdmission(state.config.num_host_blocks)
        self.num_demoted = 0
        self.num_promoted = 0
        # device block: the swap-out in flight that reads it, while nothing may write it
        self.outs: dict[int, TransferOrder] = {}
        self.loads: dict[int, TransferOrder] = {}  # host block: a load in flight that reads it
        self.fills: dict[int, TransferOrder] = {}  # host block: the order in flight that fills it
        # called with the host blocks that were written, for a tier below to store: all that is evicted has to come here, then
        self.on_filled: list[Callable[[Int32Array], None]] = []
        self.on_used: list[Callable[[Int32Array], None]] = []  # called with the host blocks that were loaded from
        self._index = state.index
        self._pool = state.pool
        self._allocator = state.allocator
        self._publisher = state.publisher
        self._for: SessionState | None = None  # the session of this call: its answer lists the orders
        self._issued: list[TransferOrder] = []
        self._is_asked = False  # whether this call is there to demote

    # The call at hand

    def begin_call(self, owner: SessionState, issued: list[TransferOrder], *, is_asked: bool) -> None:
        """From here on orders are this session's, and appended to `issued`. Without a call nothing is demoted.

        is_asked: a client asked for demotion, so the victims are copied whether that pays or not.
        """
        self._for, self._issued, self._is_asked = owner, issued, is_asked

    def finish_call(self) -> None:
        self._for, self._issued, self._is_asked = None, [], False

    # Orders

    def prepare_store(self, blocks: Int32Array, hosts: Int32Array) -> list[TransferOrder]:
        """Orders copies of device blocks to host blocks that were taken for it."""
        self._pool.begin_transfers(blocks)
        orders = self._issue(TransferKind.SWAP_OUT, blocks, hosts, 0)
        self.fills.update(zip(hosts.tolist(), orders, strict=True))
        return orders

    def prepare_load(self, hosts: Int32Array, tenant: int) -> tuple[Int32Array, list[TransferOrder]]:
        """Allocates a device block for each host block, with a reference, and orders the loads."""
        self.host.pool.begin_transfers(hosts)  # before the allocation evicts anything to the host tier
        blocks = self._allocator.allocate_for_loads(len(hosts))
        self._pool.begin_transfers(blocks)
        orders = self._issue(TransferKind.SWAP_IN, hosts, blocks, tenant)
        for order in orders:
            self.loads.setdefault(order.source, order)
        return blocks, orders

    def end_orders(self, orders: list[TransferOrder], *, ok: bool) -> None:
        """These orders have been run, or never will be. Array work: a report may name all blocks of a long sequence."""
        if not ok:
            self.transfers.num_failed += len(orders)
        outs = [order for order in orders if order.kind is TransferKind.SWAP_OUT]
        loads = [order for order in orders if order.kind is TransferKind.SWAP_IN]
        if outs:
            self.complete_store(outs, ok=ok)
        if loads:
            self.complete_load(loads, ok=ok)

    def complete_store(self, orders: list[TransferOrder], *, ok: bool) -> None:
        """Orders to the host tier have ended: its blocks hold what they were to hold, or nothing."""
        sources, destinations = _sources(orders), _destinations(orders)
        self.host.is_filling[destinations] = False
        for order in orders:
            del self.fills[order.destination]
            if self.outs.get(order.source) is order:
                del self.outs[order.source]
        if not ok:
            lost = destinations[self.host.pool.indexed[destinations]]
            self.host.pool.unindex(lost)
            self._forget_hosts(lost, MatchEnd.EVICTED)
        else:
            self._index.note_filled(destinations)
            for notify in self.on_filled:
                notify(destinations)
        self._pool.end_transfers(sources)
        self.host.pool.end_transfers(destinations)

    def complete_load(self, orders: list[TransferOrder], *, ok: bool) -> None:
        """Orders from the host tier have ended: their device blocks hold the nodes' content, or nothing."""
        sources, destinations = _sources(orders), _destinations(orders)
        for order in orders:
            if self.loads.get(order.source) is order:
                del self.loads[order.source]
        if ok:
            self._allocator.note_loaded(destinations, [order.tenant for order in orders])
            nodes, index = self._index.node_of_host[sources], self._index
            _, first = np.unique(sources, return_index=True)  # of two loads of one block, the first is the node's from now on
            first = np.sort(first[(nodes[first] > 0) & (index.held.find_blocks(sources[first]) == 0)])
            index.add_blocks(nodes[first], destinations[first], index.held.groups_of_hosts(sources[first]))
            self._pool.mark_indexed(destinations[first])
            self.num_promoted += len(first)
            self.admission.note_returned(len(first))
            for notify in self.on_used:
                notify(sources)
        self.host.pool.end_transfers(sources)
        self._pool.end_transfers(destinations)

    def demote(self, victims: Int32Array) -> Int32Array:
        """Moves evicted blocks to the host tier, as far as that is of use and it has room; returns those to be forgotten.

        Victims come leaves first, so the last ones get the room: a parent that is forgotten takes its children along. Pages of
        a tail are forgotten: hits do without them, and what they are a copy of is worth the room more.
        """
        index, host = self._index, self.host
        pages = NO_INT32
        if index.held.has_tail:
            is_page = index.held.group_of_block[victims] > 0
            pages, victims = victims[is_page], victims[~is_page]
        hosts = index.held.find_hosts(victims)
        index.leave_device(victims[hosts > 0])
        self.num_demoted += int(np.count_nonzero(hosts))
        needy = victims[hosts == 0]
        num_room = min(len(needy), host.pool.num_available) if self._for is not None else 0
        if not num_room or not (self._is_asked or self.on_filled or self.admission.admits(num_room)):
            return np.concatenate([needy, pages])
        needy, moved = needy[: len(needy) - num_room], needy[len(needy) - num_room :]
        copies = host.take_blocks(num_room, held=False)
        nodes = index.node_of_block[moved]  # now: making room in the host tier may have forgotten a node
        host.return_blocks(copies[nodes == 0])
        nodes, moved, copies = nodes[nodes > 0], moved[nodes > 0], copies[nodes > 0]
        index.add_hosts(nodes, copies, index.held.get_groups(moved))
        host.pool.mark_indexed(copies)
        self.prepare_store(moved, copies)
        index.leave_device(moved)
        self.num_demoted += len(moved)
        self.admission.note_copied(len(moved))
        return np.concatenate([needy, pages])

    def drop_copies(self, hosts: Int32Array) -> None:
        """The nodes of these host blocks were forgotten."""
        self.host.pool.unindex(hosts)

    def end_session(self, owner: SessionState, *, may_still_write: bool) -> tuple[Int32Array, list[TransferOrder]]:
        """The session's orders will never be run, or are still being run: none counts.

        Returns their device destinations, quarantined where it may still write, and the orders; the caller notifies their
        waiters.
        """
        orders = self.transfers.take_orders(order.id for order in self.transfers.list_orders(owner))
        loads = _destinations([order for order in orders if order.kind is TransferKind.SWAP_IN])
        if may_still_write:
            fills = [order for order in orders if order.kind is TransferKind.SWAP_OUT]
            self._pool.quarantine(loads, fences=NO_INT32)
            self.host.quarantine(owner.session, _destinations(fills))
        self.end_orders(orders, ok=False)
        return loads if may_still_write else NO_INT32, orders

    def _issue(self, kind: TransferKind, sources: Int32Array, destinations: Int32Array, tenant: int) -> list[TransferOrder]:
        owner = self._for
        assert owner is not None, "an order without a call to report it"
        pairs = zip(sources.tolist(), destinations.tolist(), strict=True)
        orders = [self.transfers.issue(kind, source, destination, owner, tenant) for source, destination in pairs]
        self._issued.extend(orders)
        return orders

    def _forget_hosts(self, hosts: Int32Array, why: MatchEnd) -> None:
        """Host copies are lost, and with them what nothing else holds."""
        lost = self._index.forget_hosts(hosts, why)
        if len(lost):
            num_freed = self._pool.unindex(lost)
            if why is not MatchEnd.EXPIRED:
                self._pool.num_evicted += num_freed
            self._publisher.disown()


def _sources(orders: list[TransferOrder]) -> Int32Array:
    return np.array([order.source for order in orders], np.int32)


def _destinations(orders: list[TransferOrder]) -> Int32Array:
    return np.array([order.destination for order in orders], np.int32)
