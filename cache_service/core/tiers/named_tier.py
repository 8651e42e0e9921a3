"""A tier below the host tier, asked by the name of content: on a disk of its own, or in a store that others share.

Owns the orders in flight between the tier's places and host blocks, and which sequences wait for them; the table that is handed
in knows which name is where. The verbs: lookup, prepare_load and complete_load, prepare_store and complete_store; a tier that
does not know what is stored is asked a question first. Rules: nothing that was read counts before it was verified; a host block
is neither reused nor evicted while an order has an end there, however late that is; a load is taken into the index top down, up
to its first block that failed, behind a parent that is still there. No request depends on the tier: a sequence waits for its
load up to a deadline and starts without it then, and a tier that fails or hangs is left alone for a while. Knows no file, no
network and no thread. Whether a load is worth its time is for worth.py to say.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..pool_state import PoolState
from ..values.copies import TierOrder, TierResult
from ..values.types import Int32Array, MatchEnd
from .breaker import Breaker
from .content_names import ContentNames
from .group_loads import GroupLoads
from .host_tier import HostTier
from .offload import Offloader
from .worth import TierWorth

_STORE_PATIENCE = 4  # deadlines that a store may take: nobody waits for it
_MOST_TURNS = 4  # questions about one prompt with several groups of layers


class TierRules(NamedTuple):
    """How a tier is used. on_second_use: only blocks that were loaded back from the host tier are stored.

    weighs: loads that take longer than computing are not ordered, see worth.py. tenants: whose blocks are stored, if not all.
    """

    on_second_use: bool = False
    deadline: float = 2.0  # seconds that a sequence waits for its load
    most_loading: int = 4096  # blocks in flight towards the host tier
    most_asked: int = 0  # blocks of a prompt that a question is about; 0 where the table knows what is stored
    name: str = "disk"  # in the names of counts
    weighs: bool = False
    tenants: frozenset[str] | None = None


class Table(Protocol):
    """What a tier has by name, as far as it is known here: see SlotTable and ToldTable."""

    num_slots: int
    last_number: int  # of a store of an earlier run

    @property
    def may_have_some(self) -> bool: ...

    def find(self, name: bytes) -> int | None: ...

    def knows(self, name: bytes) -> bool: ...

    def names(self) -> set[bytes]: ...

    def learn(self, names: Iterable[bytes], lost: Iterable[bytes] = ()) -> None: ...

    def use(self, name: bytes) -> bool: ...

    def begin_store(self, name: bytes) -> int | None: ...

    def end_store(self, order: TierOrder, *, is_stored: bool) -> None: ...

    def begin_read(self, order: TierOrder) -> None: ...

    def end_read(self, order: TierOrder, *, is_lost: bool) -> None: ...

    def clear(self) -> None: ...

    def stats(self) -> dict[str, int]: ...

    def check(self, reads: Sequence[TierOrder], stores: Sequence[TierOrder]) -> list[str]: ...


@dataclass(slots=True, eq=False)
class Question:
    """Which of these names, each the child of the one before, are stored: so many of the first as all are.

    slot: of the sequence that waits. tokens: of its prompt up to the end of the last name. With several groups of layers a name
    is that of one block, and `asked` has those of which it is known whether they are stored, after num_turns questions.
    """

    slot: int
    root: int
    tokens: Int32Array
    first: int
    names: list[bytes]
    era: int
    asked_at: float
    deadline: float
    is_trial: bool = False  # what is found is loaded even if that does not pay
    is_in_flight: bool = True
    is_cancelled: bool = False  # too late to be worth an answer
    asked: frozenset[bytes] = frozenset()
    num_turns: int = 1


@dataclass(slots=True, eq=False)
class Load:
    """A part of a prompt on its way to the host tier.

    tokens: of the prompt up to the end of the load. first: index of its first block. held: host blocks of the blocks before it.
    wanted_at: since when a sequence has waited for it. num_entries: of a table, that it makes a hit longer.
    """

    root: int
    tokens: Int32Array
    first: int
    orders: list[TierOrder]
    held: Int32Array
    wanted_at: float
    deadline: float
    num_entries: int
    is_in_flight: bool = True


@dataclass(slots=True, eq=False)
class Store:
    """Blocks on their way from the host tier."""

    orders: list[TierOrder]
    deadline: float


@dataclass(slots=True)
class _Awaited:
    """What a sequence that was created waits for: up to `length` tokens, until `deadline`."""

    loads: list[Load]
    length: int
    deadline: float
    question: Question | None = None

    @property
    def is_on_its_way(self) -> bool:
        is_asking = self.question is not None and self.question.is_in_flight
        return is_asking or any(load.is_in_flight for load in self.loads)


@dataclass(slots=True)
class TierCounts:
    """Sums over the life of the tier, in blocks but for loads."""

    num_loads: int = 0
    num_late_loads: int = 0
    num_hit_blocks: int = 0
    num_stored_blocks: int = 0
    num_damaged_blocks: int = 0
    num_failed_blocks: int = 0


class NamedTier:
    """One such tier of one pool with a host tier."""

    def __init__(
        self,
        state: PoolState,
        offloader: Offloader,
        key: bytes,
        table: Table,
        era: int,
        rules: TierRules,
        worth: TierWorth,
    ) -> None:
        """key: see ContentNames. era: counts how often the tier was cleared."""
        self.rules, self.worth = rules, worth
        self.num_slots, self.era = table.num_slots, era
        self.breaker, self.counts = Breaker(), TierCounts()
        self.loads: dict[int, Load] = {}  # in flight, by identity, oldest first
        self.stores: dict[int, Store] = {}
        self.questions: dict[int, Question] = {}
        self.wake: Callable[[], None] = lambda: None  # called when there is something to ask, to load or to store
        self.table = table
        self._clock, self._index, self._sequences = state.clock, state.index, state.sequences
        self._block_size = state.config.block_size
        self._is_on = state.config.prefix_caching
        self._host: HostTier = offloader.host
        self._names = ContentNames(state.index, key)
        self._num_groups = len(state.config.group_windows)
        self._groups = GroupLoads(state.index, self._host, self._names) if self._num_groups > 1 else None
        self._loading: dict[bytes, Load] = {}
        self._new_loads: deque[Load] = deque()
        self._new_questions: deque[Question] = deque()
        self._candidates: deque[int] = deque()  # host blocks that may be worth a store
        self._is_candidate = np.zeros(self._host.num_blocks, np.bool_)
        self._awaited: dict[int, _Awaited] = {}  # by slot of the sequence
        self._num_stores = table.last_number
        self._is_clearing = False
        (offloader.on_used if self.rules.on_second_use else offloader.on_filled).append(self._note_candidates)

    # What a sequence waits for

    def expect(self, slot: int) -> bool:
        """What the prompt of a new sequence has in this tier is brought to the host tier. Whether it is to wait for that."""
        self._awaited.pop(slot, None)
        if not self.table.may_have_some or not self._is_on:
            return False
        seqs = self._sequences
        num_most = min((int(seqs.num_tokens[slot]) - 1) // self._block_size, int(seqs.share_limits[slot]))
        root, tokens = int(seqs.roots[slot]), seqs.prompts[slot, : num_most * self._block_size]
        if self.rules.most_asked:
            self._ask(slot, root, tokens)
            return slot in self._awaited
        loads, end = self.prepare_load(root, tokens)
        if loads:
            self._awaited[slot] = _Awaited(loads, end * self._block_size, self._clock.now + self.rules.deadline)
        return bool(loads)

    def length_to_come(self, slot: int, max_hit: int) -> int:
        """Tokens that the waiting sequence could hit once its loads have ended; 0 where it is not to wait for any."""
        awaited = self._awaited.get(slot)
        if awaited is None or not max_hit:
            return 0
        if awaited.is_on_its_way:
            if self._clock.now < awaited.deadline:
                return awaited.length
            self.counts.num_late_loads += 1
        del self._awaited[slot]
        return 0

    # Questions

    def _ask(self, slot: int, root: int, tokens: Int32Array) -> None:
        """Asks which blocks of these tokens are stored, behind what the tiers above have."""
        if self._groups is not None:
            self._ask_groups(self._groups, slot, root, tokens)
            return
        size, num_most = self._block_size, len(tokens) // self._block_size
        nodes = self._index.match(root, tokens, num_most)
        num_most = min(num_most, len(nodes) + self.rules.most_asked)
        if len(nodes) == num_most or not self._may_begin():
            return
        num_worth, is_trial = self.worth.admit(num_most - len(nodes), self.rules.deadline, self._clock.now)
        if not num_worth:  # even if all of it were there
            return
        num_most = len(nodes) + num_worth
        raw, width = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * size
        name, names = self._names.of(int(nodes[-1]) if len(nodes) else root), list[bytes]()
        for at in range(len(nodes), num_most):
            name = self._names.child(name, raw[at * width : (at + 1) * width])
            names.append(name)
        now = self._clock.now
        deadline = now + self.rules.deadline
        known = np.array(tokens[: num_most * size], np.int32)
        question = Question(slot, root, known, len(nodes), names, self.era, now, deadline, is_trial)
        self._awaited[slot] = _Awaited([], num_most * size, deadline, question)
        self._put_question(question)

    def _ask_groups(self, groups: GroupLoads, slot: int, root: int, tokens: Int32Array) -> None:
        """The same with several groups of layers: first of all that a hit on all of these tokens would read."""
        size, now, deadline = self._block_size, self._clock.now, self._clock.now + self.rules.deadline
        most = groups.num_known(root, tokens) + self.rules.most_asked // groups.num_full
        found = groups.lookup(root, tokens[: most * size], lambda name: 0, self.era)
        if not found.orders or not self._may_begin():
            return
        num_worth, is_trial = self.worth.admit(found.end - found.num_above, self.rules.deadline, now)
        if not num_worth:
            return
        end = found.num_above + num_worth
        known = np.array(tokens[: end * size], np.int32)
        names = groups.names_to_ask(root, known, self.table.find, frozenset(), self.era)
        question = Question(slot, root, known, found.first, names, self.era, now, deadline, is_trial)
        self._awaited[slot] = _Awaited([], end * size, deadline, question)
        self._put_question(question)

    def _put_question(self, question: Question) -> None:
        self.questions[id(question)] = question
        self._new_questions.append(question)
        self.wake()

    def complete_question(self, question: Question, num_stored: int | None) -> None:
        """So many of the first names are stored; None where there was no answer. What is stored is loaded."""
        self._end(question, self.questions)
        question.is_in_flight = False
        if num_stored is None:
            self.breaker.failed(self._clock.now)
            return
        if question.deadline > self._clock.now:
            self.breaker.succeeded()
        awaited = self._awaited.get(question.slot)
        if question.era != self.era or awaited is None or awaited.question is not question:
            return
        tokens = question.tokens[: (question.first + num_stored) * self._block_size]
        if self._groups is not None:
            tokens, names = question.tokens, question.names
            self.table.learn(names[:num_stored], names[num_stored : num_stored + 1])
            asked = question.asked.union(names[: num_stored + 1])
            left = self._groups.names_to_ask(question.root, tokens, self.table.find, asked, self.era)
            if left and question.num_turns < _MOST_TURNS:
                again = replace(question, names=left, asked=asked, num_turns=question.num_turns + 1, is_in_flight=True)
                awaited.question = again
                self._put_question(again)
                return
        else:
            self.table.learn(question.names[:num_stored], question.names[num_stored:])
        if num_stored or self._groups is not None:
            since, is_trial = question.asked_at, question.is_trial
            awaited.loads, end = self.prepare_load(question.root, tokens, since=since, is_trial=is_trial)
            awaited.length = end * self._block_size

    def take_questions(self) -> list[Question]:
        """Questions that were not handed out yet."""
        taken = list(self._new_questions)
        self._new_questions.clear()
        return taken

    # Loads

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
            slot = self.table.find(name)
            if slot is None:
                break
            found.append(TierOrder(slot, 0, name, parent, piece, 0, self.era))
            parent = name
        return nodes, found

    def prepare_load(
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
        if not own or not self._may_begin():
            return loads, first
        now = self._clock.now
        num_worth = len(own) if is_trial else self.worth.admit(len(own), self.rules.deadline, now)[0]
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
        is_weighed, up_to = is_trial, groups.lookups(root, tokens, self.table.find, self.era)
        while True:
            found = up_to(num_most)
            loads = {id(load): load for order in found.orders if (load := self._loading.get(order.name)) is not None}
            own = [order for order in found.orders if order.name not in self._loading]
            if not own:
                return list(loads.values()), found.end
            if not self._may_begin():
                return [], found.num_above
            if not is_weighed:
                num_worth = self.worth.admit(found.end - found.num_above, self.rules.deadline, now)[0]
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
        num_loading = sum(len(load.orders) for load in self.loads.values())
        num_room = self._host.pool.num_available // 2 or self._host.pool.num_available
        return min(num_room, self.rules.most_loading - num_loading)

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
        deadline = self._clock.now + self.rules.deadline
        load = Load(root, np.array(tokens, np.int32), first, orders, held, wanted_at, deadline, num_entries)
        for order in orders:
            self._loading[order.name] = load
            self.table.begin_read(order)
        self.loads[id(load)] = load
        self._new_loads.append(load)
        self.counts.num_loads += 1
        self.wake()
        return load

    def complete_load(self, load: Load, results: Sequence[TierResult]) -> int:
        """The orders of a load have ended, each with its result. Answers how many blocks the host tier has from it."""
        self._end(load, self.loads)
        load.is_in_flight = False
        for order, result in zip(load.orders, results, strict=True):
            if self._loading.get(order.name) is load:
                del self._loading[order.name]
            self.table.end_read(order, is_lost=result in (TierResult.DAMAGED, TierResult.MISSING))
        self._count(results)
        if results.count(TierResult.DONE) == len(results):
            self.worth.note_load(load.num_entries, self._clock.now - load.wanted_at, self._clock.now)
        host, index, size = self._host, self._index, self._block_size
        hosts = np.array([order.host for order in load.orders], np.int32)
        host.is_filling[hosts] = False
        kept: list[int] = []
        before = index.match(load.root, load.tokens[: load.first * size], load.first)
        if self._groups is not None:
            if not self._is_stale(load.orders[0]):
                kept = self._groups.take(load.root, load.tokens, load.orders, results)
        elif len(before) == load.first and not self._is_stale(load.orders[0]):
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
        self.counts.num_hit_blocks += len(kept)
        return len(kept)

    # Stores

    def prepare_store(self, max_blocks: int) -> Store | None:
        """Orders stores of up to so many blocks of the host tier that the tier lacks."""
        if self._is_clearing or not self._candidates or not self._may_begin():
            return None
        orders: list[TierOrder] = []
        while self._candidates and len(orders) < max_blocks:
            host = self._candidates.popleft()
            self._is_candidate[host] = False
            node = int(self._index.node_of_host[host])
            if not node or self._host.is_filling[host]:
                continue
            name = self._names.of(node) if self._groups is None else self._groups.name_of(host)
            if not self._is_admitted(node) or self.table.use(name):
                continue
            slot = self.table.begin_store(name)
            if slot is None:
                break
            self._num_stores += 1
            parent = self._names.of(self._index.parent(node))
            key = self._index.key(node)
            assert key is not None, "a node in use"
            orders.append(TierOrder(slot, host, name, parent, key[4:], self._num_stores, self.era))
        if not orders:
            return None
        self._host.pool.begin_transfers(np.array([order.host for order in orders], np.int32))
        store = Store(orders, self._clock.now + _STORE_PATIENCE * self.rules.deadline)
        self.stores[id(store)] = store
        return store

    def complete_store(self, store: Store, results: Sequence[TierResult]) -> None:
        """The orders of a store have ended, each with its result."""
        self._end(store, self.stores)
        self._count(results)
        for order, result in zip(store.orders, results, strict=True):
            is_stored = result is TierResult.DONE and not self._is_stale(order)
            self.counts.num_stored_blocks += is_stored
            self.table.end_store(order, is_stored=is_stored)
        self._host.pool.end_transfers(np.array([order.host for order in store.orders], np.int32)[::-1])

    def take_loads(self) -> list[Load]:
        """Loads that were ordered and not handed out yet."""
        taken = list(self._new_loads)
        self._new_loads.clear()
        return taken

    def tend(self) -> bool:
        """An overdue order makes the tier rest. Whether any is in flight, so that this is to be asked again."""
        now = self._clock.now
        if self._has_overdue(now):
            self.breaker.failed(now, is_hang=True)
        return bool(self.loads or self.stores or self.questions)

    # Clearing

    def begin_clearing(self) -> None:
        """Nothing stored before this is found after it. Until `end_clearing` nothing is stored."""
        self._is_clearing = True
        self.era += 1
        self._loading.clear()
        self._awaited.clear()
        self.table.clear()
        self.wake()

    def end_clearing(self) -> None:
        self._is_clearing = False

    # Questions

    def end_behind(self, node: int, tokens: bytes) -> MatchEnd | None:
        """Why the first block of these tokens behind this node is in no tier above, where this tier is known to have it."""
        width, name, num_known = 4 * self._block_size, self._names.of(node), 0
        for at in range(0, len(tokens) - width + 1, width):
            name = self._names.child(name, tokens[at : at + width])
            if not self.table.knows(name):
                break
            num_known += 1
        if not num_known:
            return None
        if not self._may_ask(self._clock.now):
            return MatchEnd.DISK_RESTS
        pays = self.worth.num_paying(num_known, self.rules.deadline) > 0
        return MatchEnd.ON_DISK if pays else MatchEnd.NOT_WORTH_LOADING

    def stored_names(self) -> set[bytes]:
        """The names of all that could be loaded; for audits."""
        return self.table.names()

    def stats(self) -> dict[str, Any]:
        """By the protocol's names."""
        name, counts = self.rules.name, self.counts
        return {
            f"num_queued_{name}_blocks": len(self._candidates) + sum(len(load.orders) for load in self.loads.values()),
            f"num_{name}_rests": self.breaker.num_rests,
            f"num_{name}_loads": counts.num_loads,
            f"num_late_{name}_loads": counts.num_late_loads,
            f"num_{name}_hit_blocks": counts.num_hit_blocks,
            f"num_{name}_stored_blocks": counts.num_stored_blocks,
            f"num_damaged_{name}_blocks": counts.num_damaged_blocks,
            f"num_failed_{name}_blocks": counts.num_failed_blocks,
            f"num_unworthy_{name}_loads": self.worth.num_unworthy,
            f"{name}_first_byte_seconds": self.worth.loads.first,
            f"{name}_break_even_tokens": self.worth.least_tokens,
            **self.table.stats(),
        }

    def host_ends(self) -> tuple[Int32Array, Int32Array]:
        """For audits: host blocks, one entry for each end of an order there; and those that are being filled."""
        fills = [order.host for load in self.loads.values() for order in load.orders]
        reads = [order.host for store in self.stores.values() for order in store.orders]
        held = [load.held for load in self.loads.values()]
        return np.concatenate([np.array(fills + reads, np.int32), *held]), np.array(fills, np.int32)

    def check(self) -> list[str]:
        """The broken invariants, one sentence each."""
        reads = [order for load in self.loads.values() for order in load.orders]
        wrong = self.table.check(reads, [order for store in self.stores.values() for order in store.orders])
        if any(load is not self.loads.get(id(load)) for load in self._loading.values()):
            wrong.append("a load is joined that is not in flight")
        return wrong

    # Parts

    def _is_admitted(self, node: int) -> bool:
        """Whether blocks of this node's tenant are stored."""
        tenants = self.rules.tenants
        return tenants is None or self._index.tenants[-self._names.root_of(node) - 1] in tenants

    def _may_ask(self, now: float) -> bool:
        return not self.breaker.rests(now) and not self._has_overdue(now)

    def _may_begin(self) -> bool:
        """Whether something new may be asked of the tier now."""
        if not self._may_ask(self._clock.now):
            return False
        return not self.breaker.is_on_trial or not (self.loads or self.stores or self.questions)

    def _has_overdue(self, now: float) -> bool:
        """The oldest of each kind ends first."""
        loads, stores, questions = self.loads.values(), self.stores.values(), self.questions.values()
        oldest = next(iter(loads), None), next(iter(stores), None), next(iter(questions), None)
        return any(each is not None and each.deadline <= now for each in oldest)

    def _end(self, which: Load | Store | Question, among: dict[int, Load] | dict[int, Store] | dict[int, Question]) -> None:
        now = self._clock.now
        if which.deadline <= now:
            self.breaker.failed(now, is_hang=True)
        del among[id(which)]

    def _count(self, results: Sequence[TierResult]) -> None:
        num_failed = results.count(TierResult.FAILED)
        self.counts.num_failed_blocks += num_failed
        self.counts.num_damaged_blocks += results.count(TierResult.DAMAGED)
        if num_failed:
            self.breaker.failed(self._clock.now)
        elif any(result in (TierResult.DONE, TierResult.DAMAGED, TierResult.MISSING) for result in results):
            self.breaker.succeeded()

    def _is_stale(self, order: TierOrder) -> bool:
        """Whether the tier was cleared since the order was made."""
        return order.era != self.era

    def _note_candidates(self, hosts: Int32Array) -> None:
        new = hosts[(self._index.node_of_host[hosts] > 0) & ~self._is_candidate[hosts]]
        if len(new):
            self._is_candidate[new] = True
            self._candidates.extend(new.tolist())
            self.wake()
