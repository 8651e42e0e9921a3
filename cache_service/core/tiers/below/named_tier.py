"""A tier below the host tier, asked by the name of content: on a disk of its own, or in a store that others share.

Owns which sequences wait for what, and hands the rest to its parts: what is asked (tier_questions), brought up (tier_loads) and
put there (tier_stores), and what of it has not ended (in_flight); the table that is handed in knows which name is where. The
verbs: lookup, prepare_load and complete_load, prepare_store and complete_store; a tier that does not know what is stored is
asked a question first. Rules: no request depends on the tier: a sequence waits for its load up to a deadline and starts without
it then, and a tier that fails or hangs is left alone for a while. Knows no file, no network and no thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...pool_state import PoolState
from ...values.copies import TierOrder, TierResult
from ...values.types import Int32Array, MatchEnd, Tier
from ..offload import Offloader
from .breaker import Breaker
from .content_names import ContentNames
from .group_loads import GroupLoads
from .in_flight import InFlight
from .shared_parts import SharedParts
from .tier_loads import TierLoads
from .tier_orders import Load, Question, Store, Table, TierRules
from .tier_questions import TierQuestions
from .tier_stores import TierStores
from .worth import TierWorth


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
        tier: Tier,
    ) -> None:
        """key: see ContentNames. era: counts how often the tier was cleared."""
        self.rules, self.worth, self.table, self.num_slots = rules, worth, table, table.num_slots
        self.tier = tier
        self.flight = InFlight(state.clock, era)
        self._clock, self._sequences = state.clock, state.sequences
        self._block_size = state.config.block_size
        self._is_on = state.config.prefix_caching
        host, names = offloader.host, ContentNames(state.index, key)
        groups = GroupLoads(state.index, host, names) if len(state.config.group_spans) > 1 else None
        self._names, self._groups, self._index = names, groups, state.index
        shared = SharedParts(state, host, names, groups, table, rules, worth, self.flight)
        self._questions, self._loads, self._stores = TierQuestions(shared), TierLoads(shared), TierStores(shared)
        self._awaited: dict[int, _Awaited] = {}  # by slot of the sequence
        (offloader.on_used if rules.on_second_use else offloader.on_filled).append(self._stores.note_candidates)

    # What is in flight

    @property
    def era(self) -> int:
        return self.flight.era

    @property
    def breaker(self) -> Breaker:
        return self.flight.breaker

    @property
    def loads(self) -> dict[int, Load]:
        """In flight, by identity, oldest first; so are the others."""
        return self.flight.loads

    @property
    def stores(self) -> dict[int, Store]:
        return self.flight.stores

    @property
    def questions(self) -> dict[int, Question]:
        return self.flight.questions

    def on_work(self, wake: Callable[[], None]) -> None:
        """wake() is called when there is something to ask, to load or to store."""
        self.flight.wake = wake

    def tend(self) -> bool:
        """An overdue order makes the tier rest. Whether any is in flight, so that this is to be asked again."""
        return self.flight.tend()

    # What a sequence waits for

    def expect(self, slot: int) -> bool:
        """What the prompt of a new sequence has in this tier is brought to the host tier. Whether it is to wait for that."""
        self._awaited.pop(slot, None)
        if not self.table.may_have_some or not self._is_on:
            return False
        seqs = self._sequences
        num_most = min((int(seqs.num_tokens[slot]) - 1) // self._block_size, int(seqs.share_limits[slot]))
        root, tokens = int(seqs.roots[slot]), seqs.known_tokens(slot)[: num_most * self._block_size]
        if self.rules.most_asked:
            question = self._questions.ask(slot, root, tokens)
            if question is not None:
                self._awaited[slot] = _Awaited([], len(question.tokens), question.deadline, question)
            return question is not None
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
            self.flight.counts.num_late_loads += 1
        del self._awaited[slot]
        return 0

    # Orders

    def take_questions(self) -> list[Question]:
        """Questions that were not handed out yet."""
        return self._questions.take()

    def complete_question(self, question: Question, num_stored: int | None) -> None:
        """So many of the first names are stored; None where there was no answer. What is stored is loaded."""
        awaited = self._awaited.get(question.slot)
        is_awaited = awaited is not None and awaited.question is question
        found = self._questions.complete(question, num_stored, is_awaited=is_awaited)
        if found is None or awaited is None:
            return
        if isinstance(found, Question):
            awaited.question = found
            return
        since, is_trial = question.asked_at, question.is_trial
        awaited.loads, end = self.prepare_load(question.root, found, since=since, is_trial=is_trial)
        awaited.length = end * self._block_size

    def lookup(self, root: int, tokens: Int32Array) -> tuple[Int32Array, list[TierOrder]]:
        """See TierLoads.lookup."""
        return self._loads.lookup(root, tokens)

    def prepare_load(
        self, root: int, tokens: Int32Array, *, since: float | None = None, is_trial: bool = False
    ) -> tuple[list[Load], int]:
        """See TierLoads.prepare."""
        return self._loads.prepare(root, tokens, since=since, is_trial=is_trial)

    def take_loads(self) -> list[Load]:
        """Loads that were ordered and not handed out yet."""
        return self._loads.take()

    def complete_load(self, load: Load, results: Sequence[TierResult]) -> int:
        """The orders of a load have ended, each with its result. Answers how many blocks the host tier has from it."""
        return self._loads.complete(load, results)

    def prepare_store(self, max_blocks: int) -> Store | None:
        """Orders stores of up to so many blocks of the host tier that the tier lacks."""
        return self._stores.prepare(max_blocks)

    def complete_store(self, store: Store, results: Sequence[TierResult]) -> None:
        """The orders of a store have ended, each with its result."""
        self._stores.complete(store, results)

    # Clearing

    def begin_clearing(self) -> None:
        """Nothing stored before this is found after it. Until `end_clearing` nothing is stored."""
        self._stores.is_clearing = True
        self.flight.era += 1
        self._loads.forget()
        self._awaited.clear()
        self.table.clear()
        self.flight.wake()

    def end_clearing(self) -> None:
        self._stores.is_clearing = False

    # Inspection

    def end_behind(self, tenant: str, node: int, tokens: bytes) -> MatchEnd | None:
        """Why the first block of these tokens behind this node is in no tier above, where this tier is known to have it.

        node 0: that of a tenant that this run has not met.
        """
        width, num_known = 4 * self._block_size, 0
        name = self._names.of(node) if node else self._names.first(tenant)
        for at in range(0, len(tokens) - width + 1, width):
            name = self._names.child(name, tokens[at : at + width])
            if not self.table.knows(name):
                break
            num_known += 1
        if not num_known:
            return None
        if not self.flight.may_ask(self._clock.now):
            return MatchEnd.DISK_RESTS
        pays = self.worth.num_paying(num_known, self.rules.deadline) > 0
        return MatchEnd.ON_DISK if pays else MatchEnd.NOT_WORTH_LOADING

    def end_of(self, tenant: str, tokens: Int32Array) -> int:
        """Whole blocks of a prompt that could be hit once this tier has brought what it is known to have.

        Of a pool with several groups of layers.
        """
        assert self._groups is not None, "with one group of layers the blocks that are told are all"
        return self._groups.lookup(self._index.find_root(tenant), tokens, self.table.find, self.era, tenant).end

    def stored_names(self) -> set[bytes]:
        """The names of all that could be loaded; for audits."""
        return self.table.names()

    def stats(self) -> dict[str, Any]:
        """By the protocol's names."""
        name, counts = self.rules.name, self.flight.counts
        return {
            f"num_queued_{name}_blocks": self._stores.num_candidates
            + sum(len(load.orders) for load in self.flight.loads.values()),
            f"num_{name}_rests": self.flight.breaker.num_rests,
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
        fills = [order.host for load in self.flight.loads.values() for order in load.orders]
        reads = [order.host for store in self.flight.stores.values() for order in store.orders]
        held = [load.held for load in self.flight.loads.values()]
        return np.concatenate([np.array(fills + reads, np.int32), *held]), np.array(fills, np.int32)

    def check(self) -> list[str]:
        """The broken invariants, one sentence each."""
        reads = [order for load in self.flight.loads.values() for order in load.orders]
        wrong = self.table.check(reads, [order for store in self.flight.stores.values() for order in store.orders])
        return wrong + self._loads.check()
