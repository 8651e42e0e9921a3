"""What a tier asked by name brings to the host tier: which blocks of a prompt it has, and parts of prompts on their way.

TierQuestions asks a tier that does not report what is stored. Rules: nothing is asked whose answer could not pay, see worth.py;
the directory learns the answers; with several groups of layers a question may be followed by others, for a shorter hit.

TierLoads orders what is there. Rules: nothing that was read counts before it was verified; a load is taken into the index top
down, up to its first block that failed, behind a parent that is still there; what is on its way for one sequence is joined by
others; a host block is neither reused nor evicted while an order has an end there, however late that is.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..pool_state import PoolState
from ..values.copies import Content, TierOrder, TierResult
from ..values.types import Int32Array
from .directory import Directory
from .host_tier import HostTier
from .lookup import ContentNames, TierLookup
from .orders import InFlight, Load, Question, TierRules
from .worth import TierWorth

_MOST_TURNS = 4  # questions about one prompt with several groups of layers


@dataclass(frozen=True, slots=True)
class TierParts:
    """What the questions, loads and stores of one tier all work on."""

    state: PoolState
    host: HostTier
    names: ContentNames
    lookup: TierLookup
    directory: Directory
    rules: TierRules
    worth: TierWorth
    flight: InFlight


class TierQuestions:
    """The questions to one tier."""

    def __init__(self, parts: TierParts) -> None:
        state = parts.state
        self._clock, self._index, self._block_size = state.clock, state.index, state.config.block_size
        self._lookup, self._directory, self._block_names = parts.lookup, parts.directory, state.block_names
        self._rules, self._worth, self._flight = parts.rules, parts.worth, parts.flight
        self._new: deque[Question] = deque()

    def ask(self, slot: int, root: int, tokens: Int32Array) -> Question | None:
        """Asks whether all is stored that a hit on these tokens would read beside what the tiers above have.

        Returns None where that is not worth it.
        """
        size, now = self._block_size, self._clock.now
        most = self._lookup.num_known(root, tokens) + self._rules.most_asked // len(self._lookup.full_groups)
        up_to = self._lookup.lookups(root, tokens[: most * size], lambda name: 0)
        found = up_to(min(most, len(tokens) // size))
        if not found.orders or not self._flight.may_begin():
            return None
        num_worth, is_trial = self._worth.admit(found.end - found.num_above, self._rules.deadline, now)
        if not num_worth:  # even if all of it were there
            return None
        end = found.num_above + num_worth
        orders = (found if end == found.end else up_to(end)).orders
        names, num_full = self._in_order(orders)
        known, deadline = np.array(tokens[: end * size], np.int32), now + self._rules.deadline
        question = Question(slot, root, known, found.first, names, num_full, self._flight.era, now, deadline, is_trial)
        self._put(question)
        return question

    def _in_order(self, orders: list[TierOrder]) -> tuple[list[bytes], int]:
        """Their names, first those of the groups that read all tokens, whose number is returned; windows, the last first."""
        full, windows = list[bytes](), list[bytes]()
        for order in orders:
            (full if order.group in self._lookup.full_groups else windows).append(order.name)
        return full + windows[::-1], len(full)

    def _put(self, question: Question) -> None:
        self._flight.questions[id(question)] = question
        self._new.append(question)
        self._flight.wake()

    def complete(self, question: Question, num_stored: int | None, *, is_wanted: bool) -> Question | Int32Array | None:
        """So many of the first names are stored; None where there was no answer. is_wanted: its sequence still waits for it.

        Returns what follows: another question, or the tokens of which what is stored is to be loaded, or None.
        """
        self._flight.end(question, self._flight.questions)
        question.is_in_flight = False
        if num_stored is None:
            self._flight.breaker.failed(self._clock.now)
            return None
        if question.deadline > self._clock.now:
            self._flight.breaker.succeeded()
        if question.era != self._flight.era or not is_wanted:
            return None
        names, find = question.names, self._directory.find
        self._directory.learn(self._contents(question, names[:num_stored]), _lost(question, num_stored))
        asked = question.asked.union(names[: num_stored + 1])
        up_to = self._lookup.lookups(question.root, question.tokens, lambda name: find(name) if name in asked else 0)
        found = up_to(len(question.tokens) // self._block_size)
        left, num_full = self._in_order([order for order in found.orders if order.name not in asked])
        if not left or question.num_turns >= _MOST_TURNS:
            return question.tokens
        num_turns = question.num_turns + 1
        again = replace(
            question,
            first=found.first,  # the index may have lost some since
            names=left,
            num_full=num_full,
            asked=asked,
            num_turns=num_turns,
            is_in_flight=True,
        )
        self._put(again)
        return again

    def _contents(self, question: Question, names: list[bytes]) -> list[Content]:
        """What is stored under these names of a question; blocks of the first group with their tokens."""
        stored, size = set(names), 4 * self._block_size
        chain = self._lookup.names_behind(question.root, question.tokens, question.first)
        raw, known = question.tokens.astype("<i4").tobytes(), dict[bytes, Content]()
        nodes = self._index.match(question.root, question.tokens, question.first)
        parent = self._block_names.of(int(nodes[-1]) if len(nodes) else question.root)
        for at in range(len(nodes), question.first + len(chain)):
            piece = raw[at * size : (at + 1) * size]
            block_name = self._block_names.child(parent, piece)
            if at >= question.first and (name := chain[at - question.first]) in stored:
                known[name] = Content(name, block_name, parent, piece)
            parent = block_name
            if len(known) == len(stored):  # what is behind them is not asked for
                break
        return [known.get(name) or Content(name) for name in names]

    def take(self) -> list[Question]:
        """Questions that were not handed out yet."""
        taken = list(self._new)
        self._new.clear()
        return taken


def _lost(question: Question, num_stored: int) -> list[bytes]:
    """The names that are not stored, or of no use without one that is not; of others behind the first it is not known."""
    return question.names[num_stored : max(question.num_full, num_stored + 1)]


class TierLoads:
    """The loads of one tier."""

    def __init__(self, parts: TierParts) -> None:
        state = parts.state
        self._clock, self._index, self._block_size = state.clock, state.index, state.config.block_size
        self._num_groups = len(state.config.group_spans)
        self._host, self._lookup, self._directory = parts.host, parts.lookup, parts.directory
        self._rules, self._worth, self._flight = parts.rules, parts.worth, parts.flight
        self._loading: dict[bytes, Load] = {}
        self._new: deque[Load] = deque()

    def prepare(
        self, root: int, tokens: Int32Array, *, since: float | None = None, is_trial: bool = False
    ) -> tuple[list[Load], int]:
        """Orders what the tier has of these tokens beside what the tiers above have, as far as the host tier has room.

        since: when a sequence began to wait for it, if not now. is_trial: also what would be computed sooner than loaded.
        Returns the loads that bring it, those under way for others included, and how many blocks of the prompt are cached then.
        A load that does not pay or has no room whole is cut to an end where it does.
        """
        now, size, num_most = self._clock.now, self._block_size, len(tokens) // self._block_size
        is_weighed, may_begin = is_trial, self._flight.may_begin()
        up_to = self._lookup.lookups(root, tokens, self._directory.find)
        while True:
            found = up_to(num_most)
            joined = {id(load): load for order in found.orders if (load := self._loading.get(order.name)) is not None}
            own = [order for order in found.orders if order.name not in self._loading]
            if not own:
                return list(joined.values()), found.end
            num_joined = len({order.entry for order in found.orders if order.entry < own[0].entry})
            num_entries = found.end - found.num_above - num_joined
            if may_begin and not is_weighed:
                num_worth = self._worth.admit(num_entries, self._rules.deadline, now)[0]
                is_weighed, num_most = True, found.end - num_entries + num_worth
                if num_most < found.end:
                    continue
            self._host.pool.begin_transfers(found.held)  # what leads to the load stays while it lasts
            num_missing = len(own) - (self._num_room() if may_begin else 0)
            if num_missing <= 0:
                wanted_at = now if since is None else since
                load = self._begin(root, tokens[: found.end * size], own, found.held, wanted_at, num_entries)
                return [*joined.values(), load], found.end
            self._host.pool.end_transfers(found.held[::-1])
            num_most = max(found.end - -(-num_missing // self._num_groups), 0)

    def _num_room(self) -> int:
        """Blocks of the host tier that a load may take."""
        num_loading = sum(len(load.orders) for load in self._flight.loads.values())
        num_room = self._host.pool.num_available // 2 or self._host.pool.num_available
        return max(min(num_room, self._rules.most_loading - num_loading), 0)

    def _begin(
        self,
        root: int,
        tokens: Int32Array,
        wanted: list[TierOrder],
        held: Int32Array,
        wanted_at: float,
        num_entries: int,
    ) -> Load:
        """Gives the orders their host blocks. held: ends of transfers that end with the load."""
        blocks = self._host.take_blocks(len(wanted), held=False).tolist()
        orders = [order._replace(host=host) for order, host in zip(wanted, blocks, strict=True)]
        deadline = self._clock.now + self._rules.deadline
        load = Load(root, np.array(tokens, np.int32), orders, held, wanted_at, deadline, num_entries)
        for order in orders:
            self._loading[order.name] = load
            self._directory.begin_read(order)
        self._flight.loads[id(load)] = load
        self._new.append(load)
        self._flight.counts.num_loads += 1
        self._flight.wake()
        return load

    def complete(self, load: Load, results: Sequence[TierResult]) -> int:
        """The orders of a load have ended, each with its result. Returns how many blocks the host tier has from it."""
        self._flight.end(load, self._flight.loads)
        load.is_in_flight = False
        for order, result in zip(load.orders, results, strict=True):
            if self._loading.get(order.name) is load:
                del self._loading[order.name]
            self._directory.end_read(order, is_lost=result in (TierResult.DAMAGED, TierResult.MISSING))
        self._flight.count(results)
        if results.count(TierResult.DONE) == len(results):
            self._worth.note_load(load.num_entries, self._clock.now - load.wanted_at, self._clock.now)
        host = self._host
        hosts = np.array([order.host for order in load.orders], np.int32)
        host.is_filling[hosts] = False
        is_stale = self._flight.is_stale(load.orders[0])
        taken = np.array([] if is_stale else self._lookup.take(load.root, load.tokens, load.orders, results), np.int32)
        host.pool.mark_indexed(taken)
        self._index.note_filled(taken)
        host.pool.end_transfers(hosts[::-1])  # leaves before parents
        host.pool.end_transfers(load.held[::-1])
        self._flight.counts.num_hit_blocks += len(taken)
        return len(taken)

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
