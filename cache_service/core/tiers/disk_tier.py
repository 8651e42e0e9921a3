"""The disk tier: blocks of a slab behind the host tier, found by the name of their content, in this run and in later ones.

Owns which slot holds which content, which is evicted next, and the orders in flight between slots and host blocks. The verbs
are those of a tier that is asked by name: lookup, prepare_load and complete_load, prepare_store and complete_store. Rules: a
slot is read only under the name that it was stored under, and nothing that was read counts before it was verified; a host block
is neither reused nor evicted while an order has an end there, however late that is; a load is taken into the index top down, up
to its first block that failed, behind a parent that is still there. No request depends on a disk: a sequence waits for its load
up to a deadline and starts without it then, and a disk that fails or hangs is left alone for a while. Knows no file and no
thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..eviction import make_policy
from ..pool_state import PoolState
from ..values.copies import DiskOrder, DiskResult, StoredBlock
from ..values.types import Int32Array, MatchEnd
from .breaker import Breaker
from .content_names import ContentNames
from .host_tier import HostTier
from .offload import Offloader

_STORE_PATIENCE = 4  # deadlines that a store may take: nobody waits for it


class DiskRules(NamedTuple):
    """How a disk tier is used. on_second_use: only blocks that were loaded back from the host tier are stored."""

    on_second_use: bool = False
    deadline: float = 2.0  # seconds that a sequence waits for its load
    most_loading: int = 4096  # blocks in flight towards the host tier
    eviction_policy: str = "lru"


@dataclass(slots=True, eq=False)
class Load:
    """A part of a prompt on its way to the host tier.

    tokens: of the prompt up to the end of the load. first: index of its first block. held: host blocks of the blocks before it.
    """

    root: int
    tokens: Int32Array
    first: int
    orders: list[DiskOrder]
    held: Int32Array
    deadline: float
    is_in_flight: bool = True


@dataclass(slots=True, eq=False)
class Store:
    """Blocks on their way from the host tier."""

    orders: list[DiskOrder]
    deadline: float


@dataclass(slots=True)
class _Awaited:
    """What a sequence that was created waits for: up to `length` tokens, until `deadline`."""

    loads: list[Load]
    length: int
    deadline: float


@dataclass(slots=True)
class DiskCounts:
    """Sums over the life of the tier, in blocks but for loads. The names are the protocol's."""

    num_disk_loads: int = 0
    num_late_disk_loads: int = 0
    num_disk_hit_blocks: int = 0
    num_disk_stored_blocks: int = 0
    num_evicted_disk_blocks: int = 0
    num_damaged_disk_blocks: int = 0
    num_failed_disk_blocks: int = 0


@dataclass(slots=True)
class _Slots:
    """Slots 1 to number: what each holds, and how many loads read it."""

    names: list[bytes | None]
    free: deque[int]
    of_name: dict[bytes, int] = field(default_factory=dict)
    storing: set[int] = field(default_factory=set)
    num_reads: dict[int, int] = field(default_factory=dict)


class DiskTier:
    """The disk tier of one pool with a host tier."""

    def __init__(
        self,
        state: PoolState,
        offloader: Offloader,
        key: bytes,
        num_slots: int,
        era: int,
        stored: Sequence[StoredBlock] = (),
        rules: DiskRules | None = None,
    ) -> None:
        """key: see ContentNames. stored: what earlier runs have left under this key in this era. Slots are 1 to num_slots."""
        self.rules = rules or DiskRules()
        self.num_slots, self.era = num_slots, era
        self.breaker, self.counts = Breaker(), DiskCounts()
        self.loads: dict[int, Load] = {}  # in flight, by identity, oldest first
        self.stores: dict[int, Store] = {}
        self.wake: Callable[[], None] = lambda: None  # called when there is something to load or to store
        self._clock, self._index, self._sequences = state.clock, state.index, state.sequences
        self._block_size = state.config.block_size
        self._is_on = state.config.prefix_caching
        self._host: HostTier = offloader.host
        self._names = ContentNames(state.index, key)
        self._policy = make_policy(self.rules.eviction_policy, num_slots + 1)
        self._loading: dict[bytes, Load] = {}
        self._new_loads: deque[Load] = deque()
        self._candidates: deque[int] = deque()  # host blocks that may be worth a store
        self._is_candidate = np.zeros(self._host.num_blocks, np.bool_)
        self._awaited: dict[int, _Awaited] = {}  # by slot of the sequence
        self._num_stores = max((block.number for block in stored), default=0)
        self._is_clearing = False
        self._slots = self._restored(stored)
        if self.rules.on_second_use:
            offloader.on_used = self._note_candidates
        else:
            offloader.on_filled = self._note_candidates

    def _restored(self, stored: Sequence[StoredBlock]) -> _Slots:
        slots = _Slots([None] * (self.num_slots + 1), deque())
        for slot, name, _ in sorted(stored, key=lambda block: block.number, reverse=True):
            if name not in slots.of_name and slots.names[slot] is None:  # of two of one name the younger one counts
                slots.of_name[name], slots.names[slot] = slot, name
        slots.free.extend(slot for slot in range(1, self.num_slots + 1) if slots.names[slot] is None)
        # Parents were stored before their children as a rule, so the youngest go first into the order, as leaves do.
        numbers = {block.slot: block.number for block in stored}
        oldest_first = sorted(slots.of_name.values(), key=numbers.__getitem__)
        self._policy.add(np.array(oldest_first, np.int32))
        return slots

    # What a sequence waits for

    def expect(self, slot: int) -> None:
        """A sequence was created in this slot: what its prompt has on the disk is brought to the host tier."""
        self._awaited.pop(slot, None)
        if not self._slots.of_name or not self._is_on:
            return
        seqs = self._sequences
        num_most = min((int(seqs.num_tokens[slot]) - 1) // self._block_size, int(seqs.share_limits[slot]))
        loads, end = self.prepare_load(int(seqs.roots[slot]), seqs.prompts[slot, : num_most * self._block_size])
        if loads:
            self._awaited[slot] = _Awaited(loads, end * self._block_size, self._clock.now + self.rules.deadline)

    def length_to_come(self, slot: int, max_hit: int) -> int:
        """Tokens that the waiting sequence could hit once its loads have ended; 0 where it is not to wait for any."""
        awaited = self._awaited.get(slot)
        if awaited is None or not max_hit:
            return 0
        if any(load.is_in_flight for load in awaited.loads):
            if self._clock.now < awaited.deadline:
                return awaited.length
            self.counts.num_late_disk_loads += 1
        del self._awaited[slot]
        return 0

    # Loads

    def lookup(self, root: int, tokens: Int32Array) -> tuple[Int32Array, list[DiskOrder]]:
        """What is cached of a prompt's first blocks: the nodes [n] of the tiers above, and behind them what the slab has.

        The orders have no host block yet. Changes nothing but the order of eviction.
        """
        size, num_most = self._block_size, len(tokens) // self._block_size
        nodes = self._index.match(root, tokens, num_most)
        found: list[DiskOrder] = []
        if len(nodes) == num_most:
            return nodes, found
        raw, width = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * size
        parent = self._names.of(int(nodes[-1]) if len(nodes) else root)
        for at in range(len(nodes), num_most):
            piece = raw[at * width : (at + 1) * width]
            name = self._names.child(parent, piece)
            slot = self._slots.of_name.get(name)
            if slot is None or slot in self._slots.storing:
                break
            found.append(DiskOrder(slot, 0, name, parent, piece, 0, self.era))
            parent = name
        return nodes, found

    def prepare_load(self, root: int, tokens: Int32Array) -> tuple[list[Load], int]:
        """Orders what the slab has of these tokens behind what the tiers above have, as far as the host tier has room.

        Answers the loads that bring it, those under way for others included, and how many blocks of the prompt are cached then.
        """
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
        if not own or not self._may_begin():
            return loads, first
        hosts = self._index.host_of_node[nodes]
        held = hosts[hosts > 0]
        self._host.pool.begin_transfers(held)  # what leads to the load stays while it lasts
        num_loading = sum(len(load.orders) for load in self.loads.values())
        num_room = min(len(own), self._host.pool.num_available // 2 or self._host.pool.num_available)
        num_room = min(num_room, self.rules.most_loading - num_loading)
        if num_room <= 0:
            self._host.pool.end_transfers(held[::-1])
            return loads, first
        blocks = self._host.take_blocks(num_room, held=False).tolist()
        orders = [
            DiskOrder(order.slot, host, order.name, order.parent, order.tokens, 0, self.era)
            for order, host in zip(own, blocks, strict=False)
        ]
        end = first + num_room
        known = np.array(tokens[: end * self._block_size], np.int32)
        load = Load(root, known, first, orders, held, self._clock.now + self.rules.deadline)
        for order in orders:
            self._loading[order.name] = load
            self._begin_read(order.slot)
        self.loads[id(load)] = load
        self._new_loads.append(load)
        self.counts.num_disk_loads += 1
        self.wake()
        return [*loads, load], end

    def complete_load(self, load: Load, results: Sequence[DiskResult]) -> int:
        """The orders of a load have ended, each with its result. Answers how many blocks the host tier has from it."""
        self._end(load, self.loads)
        load.is_in_flight = False
        for order, result in zip(load.orders, results, strict=True):
            if self._loading.get(order.name) is load:
                del self._loading[order.name]
            self._end_read(order, is_lost=result is DiskResult.DAMAGED)
        self._count(results)
        host, index, size = self._host, self._index, self._block_size
        hosts = np.array([order.host for order in load.orders], np.int32)
        host.is_filling[hosts] = False
        kept: list[int] = []
        before = index.match(load.root, load.tokens[: load.first * size], load.first)
        if len(before) == load.first and not self._is_stale(load.orders[0]):
            node = int(before[-1]) if load.first else load.root
            for order, result in zip(load.orders, results, strict=True):
                if result is not DiskResult.DONE:
                    break
                node, is_taken = index.insert_on_host(node, order.tokens, order.host)
                if is_taken:
                    kept.append(order.host)
        taken = np.array(kept, np.int32)
        host.pool.mark_indexed(taken)
        index.note_filled(taken)
        host.pool.end_transfers(hosts[::-1])  # leaves before parents
        host.pool.end_transfers(load.held[::-1])
        self.counts.num_disk_hit_blocks += len(kept)
        return len(kept)

    # Stores

    def prepare_store(self, max_blocks: int) -> Store | None:
        """Orders stores of up to so many blocks of the host tier that the slab lacks."""
        if self._is_clearing or not self._candidates or not self._may_begin():
            return None
        orders: list[DiskOrder] = []
        while self._candidates and len(orders) < max_blocks:
            host = self._candidates.popleft()
            self._is_candidate[host] = False
            node = int(self._index.node_of_host[host])
            if not node or self._host.is_filling[host]:
                continue
            name = self._names.of(node)
            known = self._slots.of_name.get(name)
            if known is not None:
                self._touch(known)
                continue
            slot = self._take_slot()
            if slot is None:
                break
            self._num_stores += 1
            parent = self._names.of(self._index.parent(node))
            key = self._index.key(node)
            assert key is not None, "a node in use"
            orders.append(DiskOrder(slot, host, name, parent, key[4:], self._num_stores, self.era))
            self._slots.of_name[name], self._slots.names[slot] = slot, name
            self._slots.storing.add(slot)
        if not orders:
            return None
        self._host.pool.begin_transfers(np.array([order.host for order in orders], np.int32))
        store = Store(orders, self._clock.now + _STORE_PATIENCE * self.rules.deadline)
        self.stores[id(store)] = store
        return store

    def complete_store(self, store: Store, results: Sequence[DiskResult]) -> None:
        """The orders of a store have ended, each with its result."""
        self._end(store, self.stores)
        self._count(results)
        for order, result in zip(store.orders, results, strict=True):
            self._slots.storing.discard(order.slot)
            if result is DiskResult.DONE and not self._is_stale(order):
                self._policy.add(np.array([order.slot], np.int32))
                self.counts.num_disk_stored_blocks += 1
            else:
                self._free_slot(order.slot)
        self._host.pool.end_transfers(np.array([order.host for order in store.orders], np.int32)[::-1])

    def take_loads(self) -> list[Load]:
        """Loads that were ordered and not handed out yet."""
        taken = list(self._new_loads)
        self._new_loads.clear()
        return taken

    def tend(self) -> bool:
        """An overdue order makes the disk rest. Whether any is in flight, so that this is to be asked again."""
        now = self._clock.now
        if self._has_overdue(now):
            self.breaker.failed(now, is_hang=True)
        return bool(self.loads or self.stores)

    # Clearing

    def begin_clearing(self) -> None:
        """Nothing stored before this is found after it. Until `end_clearing` nothing is stored."""
        self._is_clearing = True
        self.era += 1
        self._loading.clear()
        self._awaited.clear()
        slots = self._slots
        busy = slots.storing | slots.num_reads.keys()
        idle = [slot for slot in slots.of_name.values() if slot not in busy]
        self._policy.forget_blocks(np.array(idle, np.int32))
        for slot in idle:
            slots.names[slot] = None
        slots.free.extend(idle)
        slots.of_name.clear()
        self.wake()

    def end_clearing(self) -> None:
        self._is_clearing = False

    # Questions

    def end_behind(self, node: int, tokens: bytes) -> MatchEnd | None:
        """Why a block of these tokens behind this node or root is in no tier above, where the slab has it."""
        name = self._names.child(self._names.of(node), tokens)
        if name not in self._slots.of_name:
            return None
        return MatchEnd.DISK_RESTS if not self._may_ask(self._clock.now) else MatchEnd.ON_DISK

    def stored_names(self) -> set[bytes]:
        """The names of all that could be loaded; for audits."""
        slots = self._slots
        return {name for name, slot in slots.of_name.items() if slot not in slots.storing}

    def stats(self) -> dict[str, int]:
        """By the protocol's names."""
        slots = self._slots
        num_busy = len(slots.storing) + len(slots.num_reads)
        counts = {name: getattr(self.counts, name) for name in DiskCounts.__slots__}
        return {
            "num_free_disk_blocks": len(slots.free),
            "num_cached_disk_blocks": self.num_slots - len(slots.free) - num_busy,
            "num_busy_disk_blocks": num_busy,
            "num_queued_disk_blocks": len(self._candidates) + sum(len(load.orders) for load in self.loads.values()),
            "num_disk_rests": self.breaker.num_rests,
            **counts,
        }

    def host_ends(self) -> tuple[Int32Array, Int32Array]:
        """For audits: host blocks, one entry for each end of an order there; and those that are being filled."""
        fills = [order.host for load in self.loads.values() for order in load.orders]
        reads = [order.host for store in self.stores.values() for order in store.orders]
        held = [load.held for load in self.loads.values()]
        return np.concatenate([np.array(fills + reads, np.int32), *held]), np.array(fills, np.int32)

    def check(self) -> list[str]:
        """The broken invariants, one sentence each."""
        slots, wrong = self._slots, list[str]()
        order = self._policy.order()
        live = [blocks[order.stamps.are_live(blocks, stamps)] for blocks, stamps in order.rows]
        evictable = np.concatenate([order.first, *live]).tolist() if live or len(order.first) else []
        idle = {slot for slot in slots.of_name.values() if slot not in slots.storing and slot not in slots.num_reads}
        if sorted(evictable) != sorted(idle):
            wrong.append("the slots that can be evicted are not those that are stored and at rest")
        if any(slots.names[slot] != name for name, slot in slots.of_name.items()):
            wrong.append("a slot has another name than the one that it is found by")
        busy = slots.storing | slots.num_reads.keys()
        if len(slots.free) != len(set(slots.free)) or len(slots.free) + len(idle) + len(busy) != self.num_slots:
            wrong.append("free, stored and busy slots of the disk do not add up")
        reads: dict[int, int] = {}
        for load in self.loads.values():
            for each in load.orders:
                reads[each.slot] = reads.get(each.slot, 0) + 1
        if reads != slots.num_reads:
            wrong.append("slots are read by other loads than those in flight")
        if slots.storing != {each.slot for store in self.stores.values() for each in store.orders}:
            wrong.append("slots are written by other stores than those in flight")
        if any(load is not self.loads.get(id(load)) for load in self._loading.values()):
            wrong.append("a load is joined that is not in flight")
        return wrong

    # Parts

    def _may_ask(self, now: float) -> bool:
        return not self.breaker.rests(now) and not self._has_overdue(now)

    def _may_begin(self) -> bool:
        """Whether something new may be asked of the disk now."""
        if not self._may_ask(self._clock.now):
            return False
        return not self.breaker.is_on_trial or not (self.loads or self.stores)

    def _has_overdue(self, now: float) -> bool:
        """The oldest of each kind ends first."""
        oldest = next(iter(self.loads.values()), None), next(iter(self.stores.values()), None)
        return any(each is not None and each.deadline <= now for each in oldest)

    def _end(self, which: Load | Store, among: dict[int, Load] | dict[int, Store]) -> None:
        now = self._clock.now
        if which.deadline <= now:
            self.breaker.failed(now, is_hang=True)
        del among[id(which)]

    def _count(self, results: Sequence[DiskResult]) -> None:
        num_failed = results.count(DiskResult.FAILED)
        self.counts.num_failed_disk_blocks += num_failed
        self.counts.num_damaged_disk_blocks += results.count(DiskResult.DAMAGED)
        if num_failed:
            self.breaker.failed(self._clock.now)
        elif any(result in (DiskResult.DONE, DiskResult.DAMAGED) for result in results):
            self.breaker.succeeded()

    def _is_stale(self, order: DiskOrder) -> bool:
        """Whether the tier was cleared since the order was made."""
        return order.era != self.era

    def _note_candidates(self, hosts: Int32Array) -> None:
        new = hosts[(self._index.node_of_host[hosts] > 0) & ~self._is_candidate[hosts]]
        if len(new):
            self._is_candidate[new] = True
            self._candidates.extend(new.tolist())
            self.wake()

    def _take_slot(self) -> int | None:
        slots = self._slots
        if slots.free:
            return slots.free.popleft()
        if len(slots.of_name) <= len(slots.storing) + len(slots.num_reads):
            return None
        (slot,) = self._policy.take_victims(1).tolist()
        name = slots.names[slot]
        assert name is not None, "an evictable slot is stored"
        del slots.of_name[name]
        slots.names[slot] = None
        self.counts.num_evicted_disk_blocks += 1
        return int(slot)

    def _free_slot(self, slot: int) -> None:
        """Of a slot at rest that is not in the order of eviction."""
        slots, name = self._slots, self._slots.names[slot]
        if name is not None and slots.of_name.get(name) == slot:
            del slots.of_name[name]
        slots.names[slot] = None
        slots.free.append(slot)

    def _touch(self, slot: int) -> None:
        """The slot's content was of use, so it is evicted later."""
        if slot not in self._slots.storing and slot not in self._slots.num_reads:
            one = np.array([slot], np.int32)
            self._policy.hit(one)
            self._policy.add(one)

    def _begin_read(self, slot: int) -> None:
        num_before = self._slots.num_reads.get(slot, 0)
        if not num_before:
            self._policy.hit(np.array([slot], np.int32))
        self._slots.num_reads[slot] = num_before + 1

    def _end_read(self, order: DiskOrder, *, is_lost: bool) -> None:
        slots, slot = self._slots, order.slot
        slots.num_reads[slot] -= 1
        if is_lost and slots.of_name.get(order.name) == slot:
            del slots.of_name[order.name]
        if slots.num_reads[slot]:
            return
        del slots.num_reads[slot]
        if slots.of_name.get(order.name) == slot:
            self._policy.add(np.array([slot], np.int32))
        else:
            self._free_slot(slot)
