"""TierQuestions: which blocks of a prompt a tier has that does not tell what is stored.

Rules: nothing is asked whose answer could not pay, see worth.py; what is told is learned by the table. With several groups of
layers a question may be followed by others, for a shorter hit.
"""

from collections import deque
from dataclasses import replace

import numpy as np

from ...values.copies import Content
from ...values.types import Int32Array
from .group_loads import GroupLoads
from .shared_parts import SharedParts
from .tier_orders import Question

_MOST_TURNS = 4  # questions about one prompt with several groups of layers


class TierQuestions:
    """Of one tier."""

    def __init__(self, shared: SharedParts) -> None:
        state = shared.state
        self._clock, self._index, self._block_size = state.clock, state.index, state.config.block_size
        self._names, self._groups, self._table = shared.names, shared.groups, shared.table
        self._block_names = state.block_names
        self._rules, self._worth, self._flight = shared.rules, shared.worth, shared.flight
        self._new: deque[Question] = deque()

    def ask(self, slot: int, root: int, tokens: Int32Array) -> Question | None:
        """Asks which blocks of these tokens are stored, behind what the tiers above have; None where that is not worth it."""
        if self._groups is not None:
            return self._ask_groups(self._groups, slot, root, tokens)
        size, num_most = self._block_size, len(tokens) // self._block_size
        nodes = self._index.match(root, tokens, num_most)
        num_most = min(num_most, len(nodes) + self._rules.most_asked)
        if len(nodes) == num_most or not self._flight.may_begin():
            return None
        num_worth, is_trial = self._worth.admit(num_most - len(nodes), self._rules.deadline, self._clock.now)
        if not num_worth:  # even if all of it were there
            return None
        num_most = len(nodes) + num_worth
        raw, width = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * size
        name, names = self._names.of(int(nodes[-1]) if len(nodes) else root), list[bytes]()
        for at in range(len(nodes), num_most):
            name = self._names.child(name, raw[at * width : (at + 1) * width])
            names.append(name)
        now = self._clock.now
        deadline = now + self._rules.deadline
        known = np.array(tokens[: num_most * size], np.int32)
        question = Question(slot, root, known, len(nodes), names, self._flight.era, now, deadline, is_trial)
        self._put(question)
        return question

    def _ask_groups(self, groups: GroupLoads, slot: int, root: int, tokens: Int32Array) -> Question | None:
        """The same with several groups of layers: first of all that a hit on all of these tokens would read."""
        size, now, deadline = self._block_size, self._clock.now, self._clock.now + self._rules.deadline
        most = groups.num_known(root, tokens) + self._rules.most_asked // groups.num_full
        found = groups.lookup(root, tokens[: most * size], lambda name: 0, self._flight.era)
        if not found.orders or not self._flight.may_begin():
            return None
        num_worth, is_trial = self._worth.admit(found.end - found.num_above, self._rules.deadline, now)
        if not num_worth:
            return None
        end = found.num_above + num_worth
        known = np.array(tokens[: end * size], np.int32)
        names = groups.names_to_ask(root, known, self._table.find, frozenset(), self._flight.era)
        question = Question(slot, root, known, found.first, names, self._flight.era, now, deadline, is_trial)
        self._put(question)
        return question

    def _put(self, question: Question) -> None:
        self._flight.questions[id(question)] = question
        self._new.append(question)
        self._flight.wake()

    def complete(self, question: Question, num_stored: int | None, *, is_awaited: bool) -> Question | Int32Array | None:
        """So many of the first names are stored; None where there was no answer. is_awaited: a sequence still waits for it.

        Answers what follows: another question, or the tokens of which what is stored is to be loaded, or nothing.
        """
        self._flight.end(question, self._flight.questions)
        question.is_in_flight = False
        if num_stored is None:
            self._flight.breaker.failed(self._clock.now)
            return None
        if question.deadline > self._clock.now:
            self._flight.breaker.succeeded()
        if question.era != self._flight.era or not is_awaited:
            return None
        names = question.names
        if self._groups is None:
            self._table.learn(self._contents(question, names[:num_stored]), names[num_stored:])
            return question.tokens[: (question.first + num_stored) * self._block_size] if num_stored else None
        stored = set(names[:num_stored])
        chain = self._groups.names_behind(question.root, question.tokens, question.first)
        known = {each.name: each for each in self._contents(question, chain) if each.name in stored}
        contents = [known.get(name) or Content(name) for name in names[:num_stored]]
        self._table.learn(contents, names[num_stored : num_stored + 1])
        asked = question.asked.union(names[: num_stored + 1])
        left = self._groups.names_to_ask(question.root, question.tokens, self._table.find, asked, self._flight.era)
        if not left or question.num_turns >= _MOST_TURNS:
            return question.tokens
        again = replace(question, names=left, asked=asked, num_turns=question.num_turns + 1, is_in_flight=True)
        self._put(again)
        return again

    def _contents(self, question: Question, names: list[bytes]) -> list[Content]:
        """The first blocks of a question's tokens that the tiers above lacked, of these names."""
        if not names:
            return []
        raw, width = question.tokens.astype("<i4").tobytes(), 4 * self._block_size
        nodes = self._index.match(question.root, question.tokens, question.first)
        parent, found = self._block_names.of(int(nodes[-1]) if len(nodes) else question.root), list[Content]()
        for at in range(len(nodes), question.first + len(names)):
            piece = raw[at * width : (at + 1) * width]
            block_name = self._block_names.child(parent, piece)
            if at >= question.first:
                found.append(Content(names[at - question.first], block_name, parent, piece))
            parent = block_name
        return found

    def take(self) -> list[Question]:
        """Questions that were not handed out yet."""
        taken = list(self._new)
        self._new.clear()
        return taken
