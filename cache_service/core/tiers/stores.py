"""TierStores: what comes to the host tier, and is worth a place in a tier below it.

Rules: a block is a candidate once it has come there, or was used there (`on_second_use`), and is stored if the tier lacks it
and its tenant is stored at all. While the tier is cleared nothing is stored.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from ..values.copies import TierOrder, TierResult
from ..values.scopes import get_tenant
from ..values.types import Int32Array
from .loads import TierParts
from .orders import Store

_STORE_PATIENCE = 4  # deadlines that a store may take: no call waits for it


class TierStores:
    """The stores of one tier."""

    def __init__(self, parts: TierParts) -> None:
        self.is_clearing = False
        self._clock, self._index, self._block_names = parts.state.clock, parts.state.index, parts.state.block_names
        self._host, self._names, self._directory = parts.host, parts.names, parts.directory
        self._rules, self._flight = parts.rules, parts.flight
        self._candidates: deque[int] = deque()  # host blocks that may be worth a store
        self._is_candidate = np.zeros(parts.host.num_blocks, np.bool_)
        self._num_stores = parts.directory.last_number

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
            group = self._index.held.get_group(host)
            name = self._names.of_group(self._names.of(node), group)
            if not self._is_admitted(node) or self._directory.use(name):
                continue
            slot = self._directory.begin_store(name)
            if slot is None:
                break
            orders.append(self._order(slot, host, node, name, group))
        if not orders:
            return None
        self._host.pool.begin_transfers(np.array([order.host for order in orders], np.int32))
        store = Store(orders, self._clock.now + _STORE_PATIENCE * self._rules.deadline)
        self._flight.stores[id(store)] = store
        return store

    def _order(self, slot: int, host: int, node: int, name: bytes, group: int) -> TierOrder:
        self._num_stores += 1
        above, key = self._index.parent(node), self._index.key(node)
        assert key is not None, "a node in use"
        seen = (b"", b"") if group else (self._block_names.of(node), self._block_names.of(above))  # as clients see them
        return TierOrder(
            slot,
            host,
            name,
            self._names.of(above),
            key[4:],
            self._num_stores,
            self._flight.era,
            block_name=seen[0],
            parent_block_name=seen[1],
        )

    def complete(self, store: Store, results: Sequence[TierResult]) -> None:
        """The orders of a store have ended, each with its result."""
        self._flight.end(store, self._flight.stores)
        self._flight.count(results)
        for order, result in zip(store.orders, results, strict=True):
            is_stored = result is TierResult.DONE and not self._flight.is_stale(order)
            self._flight.counts.num_stored_blocks += is_stored
            self._directory.end_store(order, is_stored=is_stored)
        self._host.pool.end_transfers(np.array([order.host for order in store.orders], np.int32)[::-1])

    def note_candidates(self, hosts: Int32Array) -> None:
        """These host blocks were filled or used, as the rules have it."""
        new = hosts[(self._index.node_of_host[hosts] > 0) & ~self._is_candidate[hosts]]
        if len(new):
            self._is_candidate[new] = True
            self._candidates.extend(new.tolist())
            self._flight.wake()

    def _is_admitted(self, node: int) -> bool:
        """Whether blocks of this node's tenant are stored."""
        tenants = self._rules.tenants
        return tenants is None or get_tenant(self._index.roots.scope(self._names.get_root(node))) in tenants
