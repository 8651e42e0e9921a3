"""Tiers below the host tier, asked by the name of content: on a disk of the pool's own, or in a store that others share.

ContentTier owns which sequences wait for what of one tier. Its parts are for the runtime: what is asked (questions), brought up
(loads) and put there (stores), and what of it has not ended (flight); the directory that is handed in knows which name is
where. A tier that does not know what is stored is asked a question first. Rules: no request depends on the tier: a sequence
waits for its load up to a deadline and starts without it then, and a tier that fails or hangs is left alone for a while.

TierChain has all of them, one behind the other. The next tier is looked at once the one before has brought what it had, so that
it is asked only for what is behind that. Knows no file, no network and no thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..pool_state import PoolState
from ..values.kv_spec import WHOLE
from ..values.types import Int32Array, MatchEnd, Tier
from .directory import Directory
from .loads import TierLoads, TierParts, TierQuestions
from .lookup import ContentNames, TierLookup
from .offload import Offloader
from .orders import InFlight, Load, Question, TierRules
from .stores import TierStores
from .worth import TierWorth

_NO_SLOT = -1  # of a question for no sequence
_MOST_PREFETCHED = 16  # questions in flight, with which another one for no sequence may be asked


@dataclass(slots=True)
class _Awaited:
    """What a sequence that was created waits for: up to `length` tokens, until `deadline`."""

    loads: Sequence[Load]
    length: int
    deadline: float
    question: Question | None = None

    @property
    def is_on_its_way(self) -> bool:
        is_asking = self.question is not None and self.question.is_in_flight
        return is_asking or any(load.is_in_flight for load in self.loads)


class ContentTier:
    """One such tier of one pool with a host tier."""

    def __init__(
        self,
        state: PoolState,
        offloader: Offloader,
        key: bytes,
        directory: Directory,
        era: int,
        rules: TierRules,
        worth: TierWorth,
        tier: Tier,
    ) -> None:
        """key: see ContentNames. era: counts how often the tier was cleared."""
        self.rules, self.worth, self.directory, self.tier = rules, worth, directory, tier
        self.flight = InFlight(state.clock, era)
        self._clock, self._sequences, self._index = state.clock, state.sequences, state.index
        self._block_size = state.config.block_size
        self._is_on = state.config.prefix_caching
        names = self._names = ContentNames(state.index, key)
        self._lookup = TierLookup(state.index, offloader.host, names, self.flight)
        parts = TierParts(state, offloader.host, names, self._lookup, directory, rules, worth, self.flight)
        self.questions, self.loads, self.stores = TierQuestions(parts), TierLoads(parts), TierStores(parts)
        self._awaited: dict[int, _Awaited] = {}  # by slot of the sequence
        (offloader.on_used if rules.on_second_use else offloader.on_filled).append(self.stores.note_candidates)

    # What a sequence waits for

    def expect(self, slot: int) -> bool:
        """What the prompt of a new sequence has in this tier is brought to the host tier. Whether it is to wait for that."""
        self._awaited.pop(slot, None)
        if not self.directory.may_have_some or not self._is_on:
            return False
        seqs = self._sequences
        num_most = min((int(seqs.num_tokens[slot]) - 1) // self._block_size, int(seqs.share_limits[slot]))
        root, tokens = int(seqs.roots[slot]), seqs.tokens.known(slot)[: num_most * self._block_size]
        if self.rules.most_asked:
            question = self.questions.ask(slot, root, tokens)
            if question is not None:
                self._awaited[slot] = _Awaited([], len(question.tokens), question.deadline, question)
            return question is not None
        loads, end = self.loads.prepare(root, tokens)
        if loads:
            self._awaited[slot] = _Awaited(loads, end * self._block_size, self._clock.now + self.rules.deadline)
        return bool(loads)

    def prefetch(self, root: int, tokens: Int32Array) -> bool:
        """The same for no sequence. Whether anything is on its way, or asked for."""
        if not self.directory.may_have_some or not self._is_on:
            return False
        if not self.rules.most_asked:
            return bool(self.loads.prepare(root, tokens)[0])
        has_room = len(self.flight.questions) < _MOST_PREFETCHED
        return has_room and self.questions.ask(_NO_SLOT, root, tokens) is not None

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

    def complete_question(self, question: Question, num_stored: int | None) -> None:
        """So many of the first names are stored; None where there was no answer. What is stored is loaded."""
        awaited = self._awaited.get(question.slot)
        is_wanted = question.slot == _NO_SLOT or (awaited is not None and awaited.question is question)
        found = self.questions.complete(question, num_stored, is_wanted=is_wanted)
        if isinstance(found, Question):
            if awaited is not None:
                awaited.question = found
        elif found is not None:
            since, is_trial = question.asked_at, question.is_trial
            loads, end = self.loads.prepare(question.root, found, since=since, is_trial=is_trial)
            if awaited is not None:
                awaited.loads, awaited.length = loads, end * self._block_size

    # Clearing

    def begin_clearing(self) -> None:
        """Nothing stored before this is found after it. Until `end_clearing` nothing is stored."""
        self.stores.is_clearing = True
        self.flight.era += 1
        self.loads.forget()
        self._awaited.clear()
        self.directory.clear()
        self.flight.wake()

    def end_clearing(self) -> None:
        self.stores.is_clearing = False

    # Inspection

    def end_behind(self, scope: str, node: int, tokens: bytes) -> MatchEnd | None:
        """Why the first block of these tokens behind this node is in no tier above, where this tier is known to have it.

        node 0: that of a scope that this run has not met.
        """
        width, num_known = 4 * self._block_size, 0
        name = self._names.of(node) if node else self._names.first(scope)
        for at in range(0, len(tokens) - width + 1, width):
            name = self._names.child(name, tokens[at : at + width])
            if not self.directory.knows(name):
                break
            num_known += 1
        if not num_known:
            return None
        if not self.flight.may_ask(self._clock.now):
            return MatchEnd.DISK_RESTS
        pays = self.worth.num_paying(num_known, self.rules.deadline) > 0
        return MatchEnd.ON_DISK if pays else MatchEnd.NOT_WORTH_LOADING

    def find_end(self, scope: str, tokens: Int32Array) -> int:
        """Whole blocks of a prompt that could be hit once this tier has brought what it is known to have."""
        up_to = self._lookup.lookups(self._index.find_root(scope), tokens, self.directory.find, scope)
        return up_to(len(tokens) // self._block_size).end

    def stats(self) -> dict[str, Any]:
        """By the protocol's names."""
        name, counts = self.rules.name, self.flight.counts
        num_loading = sum(len(load.orders) for load in self.flight.loads.values())
        return {
            f"num_queued_{name}_blocks": self.stores.num_candidates + num_loading,
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
            **self.directory.stats(),
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
        wrong = self.directory.check(reads, [order for store in self.flight.stores.values() for order in store.orders])
        return wrong + self.loads.check()


class TierChain:
    """All such tiers of one pool, the nearest first."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self.tiers: list[ContentTier] = []
        self._turns: dict[int, int] = {}  # by slot of a sequence that was created: which tier it waits for

    def expect(self, slot: int) -> None:
        """A sequence was created in this slot: what it wants is brought, as far as the tiers have it."""
        self._turns[slot] = -1
        self._go_on(slot)

    def prefetch(self, root: int, tokens: Int32Array) -> None:
        """What the nearest tier that has any of these tokens has of them is brought to the host tier."""
        any(tier.prefetch(root, tokens) for tier in self.tiers)

    def uses(self, root: int) -> bool:
        """Whether a load or a question is for this root."""
        return any(root in tier.flight.roots() for tier in self.tiers)

    def length_to_come(self, slot: int, max_hit: int) -> int:
        """Tokens that the waiting sequence could hit once what it waits for has come; 0 where it is not to wait."""
        if not max_hit:
            return 0
        while slot in self._turns:
            length = self.tiers[self._turns[slot]].length_to_come(slot, max_hit)
            if length:
                return length
            self._go_on(slot)
        return 0

    def end_behind(self, scope: str, node: int, tokens: bytes) -> MatchEnd | None:
        """Why a block of these tokens behind this node is in no tier above, where one is known to have it."""
        ends = (tier.end_behind(scope, node, tokens) for tier in self.tiers)
        return next((end for end in ends if end is not None), None)

    def tiers_behind(self, scope: str, tokens: Int32Array, nodes: Int32Array) -> list[Tier]:
        """[n] the nearest tier of each block of a prompt behind these nodes, as far as all are known to be in one.

        With several groups of layers as far as one tier and those above it have all that a hit reads.
        """
        if self._state.config.group_spans != (WHOLE,):
            found: list[Tier] = []
            for tier in self.tiers:
                found += [tier.tier] * (tier.find_end(scope, tokens) - len(nodes) - len(found))
            return found
        names, below, width = self._state.block_names, self._state.below_blocks, 4 * self._state.config.block_size
        raw = tokens[len(nodes) * self._state.config.block_size :].astype("<i4").tobytes()
        name, found = names.of(int(nodes[-1])) if len(nodes) else names.first(scope), []
        for at in range(0, len(raw) - width + 1, width):
            name = names.child(name, raw[at : at + width])
            of_block = below.find_tier(name)
            if of_block is None:
                break
            found.append(of_block)
        return found

    def may_ask(self) -> bool:
        """Whether one of them may have more than is known: it would have to be asked."""
        return any(tier.rules.most_asked for tier in self.tiers)

    def begin_clearing(self) -> None:
        self._turns.clear()
        for tier in self.tiers:
            tier.begin_clearing()

    def end_clearing(self) -> None:
        for tier in self.tiers:
            tier.end_clearing()

    def stats(self) -> dict[str, Any]:
        return {name: number for tier in self.tiers for name, number in tier.stats().items()}

    def host_ends(self) -> tuple[Int32Array, Int32Array]:
        """Host blocks, one entry for each order that has an end there, and those of them that are being filled."""
        ends = [tier.host_ends() for tier in self.tiers]
        return np.concatenate([all_ends for all_ends, _ in ends]), np.concatenate([fills for _, fills in ends])

    def check(self) -> list[str]:
        return [text for tier in self.tiers for text in tier.check()]

    def _go_on(self, slot: int) -> None:
        """The next tier that has something for the sequence, if any."""
        for turn in range(self._turns[slot] + 1, len(self.tiers)):
            self._turns[slot] = turn
            if self.tiers[turn].expect(slot):
                return
        del self._turns[slot]
