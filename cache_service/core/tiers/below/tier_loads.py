"""TierLoads: parts of prompts on their way from a tier to the host tier.

Rules: nothing that was read counts before it was verified; a load is taken into the index top down, up to its first block that
failed, behind a parent that is still there; what is on its way for one sequence is joined by others; a host block is neither
reused nor evicted while an order has an end there, however late that is.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...values.copies import TierOrder, TierResult
from ...values.types import Int32Array
from .group_loads import GroupLoads
from .shared_parts import SharedParts
from .tier_orders import Load


class TierLoads:
    """Of one tier."""

    def __init__(self, shared: SharedParts) -> None:
        state = shared.state
        self._clock, self._index, self._block_size = state.clock, state.index, state.config.block_size
        self._num_groups = len(state.config.group_spans)
        self._host, self._names, self._groups, self._table = shared.host, shared.names, shared.groups, shared.table
        self._rules, self._worth, self._flight = shared.rules, shared.worth, shared.flight
        self._loading: dict[bytes, Load] = {}
        self._new: deque[Load] = deque()

    def lookup(self, root: int, tokens: Int32Array) -> tuple[Int32Array, list[TierOrder]]:
        """What is cached of a prompt's first blocks: the nodes [n] of the tiers above, and behind them what the tier has.

        The orders have no host block yet. Changes nothing but the order of eviction.
        """
        size, num_most = self._block_size, len(tokens) // self._block_size
        nodes = self._index.match(root, tokens, num_most)
        found: list[TierOrder] = []
        if len(nodes) == num_most:
            return nodes, found
        raw, width = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * size
        parent = self._names.of(int(nodes[-1]) if len(nodes) else root)
        for at in range(len(nodes), num_most):
            piece = raw[at * width : (at + 1) * width]
            name = self._names.child(parent, piece)
            slot = self._table.find(name)
            if slot is None:
                break
            found.append(TierOrder(slot, 0, name, parent, piece, 0, self._flight.era))
            parent = name
        return nodes, found

    def prepare(
        self, root: int, tokens: Int32Array, *, since: float | None = None, is_trial: bool = False
    ) -> tuple[list[Load], int]:
        """Orders what the tier has of these tokens behind what the tiers above have, as far as the host tier has room.

        since: when a sequence began to wait for it, if not now. is_trial: also what would be computed sooner than loaded.
        Answers the loads that bring it, those under way for others included, and how many blocks of the prompt are cached then.
        """
        if self._groups is not None:
            return self._prepare_groups(self._groups, root, tokens, since, is_trial=is_trial)
        nodes, found = self.lookup(root, tokens)
        loads: list[Load] = []
        num_joined = 0
        for order in found:
            load = self._loading.get(order.name)
            if load is None:
                break
            num_joined += 1
            if not loads or loads[-1] is not load:
                loads.append(load)
        first = len(nodes) + num_joined
        own = found[num_joined:]
        own = own[: next((at for at, order in enumerate(own) if order.name in self._loading), len(own))]
        if not own or not self._flight.may_begin():
            return loads, first
        now = self._clock.now
        num_worth = len(own) if is_trial else self._worth.admit(len(own), self._rules.deadline, now)[0]
        if not num_worth:
            return loads, first
        hosts = self._index.host_of_node[nodes]
        held = hosts[hosts > 0]
        self._host.pool.begin_transfers(held)  # what leads to the load stays while it lasts
        num_room = min(num_worth, self._num_room())
        if num_room <= 0:
            self._host.pool.end_transfers(held[::-1])
            return loads, first
        end = first + num_room
        known = tokens[: end * self._block_size]
        load = self._begin_load(root, known, first, own[:num_room], held, now if since is None else since, num_room)
        return [*loads, load], end

    def _prepare_groups(
        self, groups: GroupLoads, root: int, tokens: Int32Array, since: float | None, *, is_trial: bool
    ) -> tuple[list[Load], int]:
        """The same with several groups of layers. A load that has no room whole is cut to an end where it has."""
        now, size, num_most = self._clock.now, self._block_size, len(tokens) // self._block_size
        is_weighed, up_to = is_trial, groups.lookups(root, tokens, self._table.find, self._flight.era)
        while True:
            found = up_to(num_most)
            loads = {id(load): load for order in found.orders if (load := self._loading.get(order.name)) is not None}
            own = [order for order in found.orders if order.name not in self._loading]
            if not own:
                return list(loads.values()), found.end
            if not self._flight.may_begin():
                return [], found.num_above
            if not is_weighed:
                num_worth = self._worth.admit(found.end - found.num_above, self._rules.deadline, now)[0]
                is_weighed, num_most = True, found.num_above + num_worth
                if num_most < found.end:
                    continue
            self._host.pool.begin_transfers(found.held)
            num_missing = len(own) - self._num_room()
            if num_missing <= 0:
                wanted_at, num_entries = now if since is None else since, found.end - found.num_above
                known = tokens[: found.end * size]
                load = self._begin_load(root, known, min(found.first, found.end), own, found.held, wanted_at, num_entries)
                return [*loads.values(), load], found.end
            self._host.pool.end_transfers(found.held[::-1])
            num_most = max(found.end - -(-num_missing // self._num_groups), 0)

    def _num_room(self) -> int:
        """Blocks of the host tier that a load may take."""
        num_loading = sum(len(load.orders) for load in self._flight.loads.values())
        num_room = self._host.pool.num_available // 2 or self._host.pool.num_available
        return min(num_room, self._rules.most_loading - num_loading)

    def _begin_load(
        self,
        root: int,
        tokens: Int32Array,
        first: int,
        wanted: list[TierOrder],
        held: Int32Array,
        wanted_at: float,
        num_entries: int,
    ) -> Load:
        """Gives the orders their host blocks. held: ends of transfers that end with the load."""
        blocks = self._host.take_blocks(len(wanted), held=False).tolist()
        orders = [replace(order, host=host) for order, host in zip(wanted, blocks, strict=True)]
        deadline = self._clock.now + self._rules.deadline
        load = Load(root, np.array(tokens, np.int32), first, orders, held, wanted_at, deadline, num_entries)
        for order in orders:
            self._loading[order.name] = load
            self._table.begin_read(order)
        self._flight.loads[id(load)] = load
        self._new.append(load)
        self._flight.counts.num_loads += 1
        self._flight.wake()
        return load

    def complete(self, load: Load, results: Sequence[TierResult]) -> int:
        """The orders of a load have ended, each with its result. Answers how many blocks the host tier has from it."""
        self._flight.end(load, self._flight.loads)
        load.is_in_flight = False
        for order, result in zip(load.orders, results, strict=True):
            if self._loading.get(order.name) is load:
                del self._loading[order.name]
            self._table.end_read(order, is_lost=result in (TierResult.DAMAGED, TierResult.MISSING))
        self._flight.count(results)
        if results.count(TierResult.DONE) == len(results):
            self._worth.note_load(load.num_entries, self._clock.now - load.wanted_at, self._clock.now)
        host, index, size = self._host, self._index, self._block_size
        hosts = np.array([order.host for order in load.orders], np.int32)
        host.is_filling[hosts] = False
        kept: list[int] = []
        before = index.match(load.root, load.tokens[: load.first * size], load.first)
        if self._groups is not None:
            if not self._flight.is_stale(load.orders[0]):
                kept = self._groups.take(load.root, load.tokens, load.orders, results)
        elif len(before) == load.first and not self._flight.is_stale(load.orders[0]):
            node = int(before[-1]) if load.first else load.root
            for order, result in zip(load.orders, results, strict=True):
                if result is not TierResult.DONE:
                    break
                node, is_taken = index.insert_on_host(node, order.tokens, order.host)
                if is_taken:
                    kept.append(order.host)
        taken = np.array(kept, np.int32)
        host.pool.mark_indexed(taken)
        index.note_filled(taken)
        host.pool.end_transfers(hosts[::-1])  # leaves before parents
        host.pool.end_transfers(load.held[::-1])
        self._flight.counts.num_hit_blocks += len(kept)
        return len(kept)

    def take(self) -> list[Load]:
        """Loads that were ordered and not handed out yet."""
        taken = list(self._new)
        self._new.clear()
        return taken

    def forget(self) -> None:
        """No load is joined any more: the tier was cleared."""
        self._loading.clear()

    def check(self) -> list[str]:
        """The broken invariants, one sentence each."""
        if any(load is not self._flight.loads.get(id(load)) for load in self._loading.values()):
            return ["a load is joined that is not in flight"]
        return []
