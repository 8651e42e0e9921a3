"""TierStores: what comes to the host tier, and is worth a place in a tier below it.

Rules: a block is a candidate once it has come there, or was used there (`on_second_use`), and is stored if the tier lacks it
and its tenant is stored at all. While the tier is cleared nothing is stored.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...values.copies import TierOrder, TierResult
from ...values.types import Int32Array
from .shared_parts import SharedParts
from .tier_orders import Store

_STORE_PATIENCE = 4  # deadlines that a store may take: no call waits for it


class TierStores:
    """Of one tier."""

    def __init__(self, shared: SharedParts) -> None:
        self.is_clearing = False
        self._clock, self._index, self._block_names = shared.state.clock, shared.state.index, shared.state.block_names
        self._host, self._names, self._groups, self._table = shared.host, shared.names, shared.groups, shared.table
        self._rules, self._flight = shared.rules, shared.flight
        self._candidates: deque[int] = deque()  # host blocks that may be worth a store
        self._is_candidate = np.zeros(shared.host.num_blocks, np.bool_)
        self._num_stores = shared.table.last_number

    @property
    def num_candidates(self) -> int:
        return len(self._candidates)

    def prepare(self, max_blocks: int) -> Store | None:
        """Orders stores of up to so many blocks of the host tier that the tier lacks."""
        if self.is_clearing or not self._candidates or not self._flight.may_begin():
            return None
        orders: list[TierOrder] = []
        while self._candidates and len(orders) < max_blocks:
            host = self._candidates.popleft()
            self._is_candidate[host] = False
            node = int(self._index.node_of_host[host])
            if not node or self._host.is_filling[host]:
                continue
            name = self._names.of(node) if self._groups is None else self._groups.name_of(host)
            if not self._is_admitted(node) or self._table.use(name):
                continue
            slot = self._table.begin_store(name)
            if slot is None:
                break
            self._num_stores += 1
            above = self._index.parent(node)
            key = self._index.key(node)
            assert key is not None, "a node in use"
            is_first = self._groups is None or not self._index.held.group_of_host[host]
            seen = (self._block_names.of(node), self._block_names.of(above)) if is_first else (b"", b"")
            order = TierOrder(slot, host, name, self._names.of(above), key[4:], self._num_stores, self._flight.era)
            orders.append(replace(order, block_name=seen[0], parent_block_name=seen[1]))
        if not orders:
            return None
        self._host.pool.begin_transfers(np.array([order.host for order in orders], np.int32))
        store = Store(orders, self._clock.now + _STORE_PATIENCE * self._rules.deadline)
        self._flight.stores[id(store)] = store
        return store

    def complete(self, store: Store, results: Sequence[TierResult]) -> None:
        """The orders of a store have ended, each with its result."""
        self._flight.end(store, self._flight.stores)
        self._flight.count(results)
        for order, result in zip(store.orders, results, strict=True):
            is_stored = result is TierResult.DONE and not self._flight.is_stale(order)
            self._flight.counts.num_stored_blocks += is_stored
            self._table.end_store(order, is_stored=is_stored)
        self._host.pool.end_transfers(np.array([order.host for order in store.orders], np.int32)[::-1])

    def _is_admitted(self, node: int) -> bool:
        """Whether blocks of this node's tenant are stored."""
        tenants = self._rules.tenants
        return tenants is None or self._index.tenants[-self._names.root_of(node) - 1] in tenants

    def note_candidates(self, hosts: Int32Array) -> None:
        new = hosts[(self._index.node_of_host[hosts] > 0) & ~self._is_candidate[hosts]]
        if len(new):
            self._is_candidate[new] = True
            self._candidates.extend(new.tolist())
            self._flight.wake()
