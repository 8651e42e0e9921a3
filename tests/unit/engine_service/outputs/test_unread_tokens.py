"""Columns of unread tokens against lists: whatever is added, asked for and given back, each reader gets its own tokens."""

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.outputs.plain_columns import PlainColumns
from kvkeeper.engine_service.outputs.plain_reader import PlainReader
from kvkeeper.engine_service.outputs.unread_tokens import UnreadSlot, UnreadTokens
from kvkeeper.engine_service.values.request import NO_SLOT

WIDTH = 3
_ACTIONS = ["give", "give", "back", "open", "add", "add", "add", "put", "ask", "tell", "join", "read", "close", "count"]


@dataclass(eq=False)
class Owner:
    """A request, and the tokens that its slot should have."""

    ending: frozenset[int]
    num_left: int = 0
    unread: list[int] = field(default_factory=list)
    is_told: bool = False
    last_at: float = 0.0
    num_added: int = 0
    reader: PlainReader | None = None
    number: int = 0

    def tell_more(self) -> None: ...

    def takes(self, token_id: int) -> bool:
        return self.num_left > 0 and len(self.unread) < WIDTH and token_id not in self.ending

    def take(self, token_id: int, now: float) -> None:
        self.unread.append(token_id)
        self.num_left, self.last_at, self.num_added = self.num_left - 1, now, self.num_added + 1


def by_number(columns: PlainColumns) -> dict[int, list[int]]:
    """The tokens of each request."""
    numbers, tokens, found = columns.numbers.tolist(), columns.token_ids.tolist(), dict[int, list[int]]()
    for number, count in zip(numbers, columns.counts.tolist(), strict=True):
        found[number], tokens = tokens[:count], tokens[count:]
    assert not tokens
    return found


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_each_reader_gets_its_own_tokens(seed: int, num_actions: int) -> None:
    dice = random.Random(seed)
    unread = UnreadTokens[Owner](WIDTH)
    slots: dict[Owner, UnreadSlot] = {}
    readers = [PlainReader(lambda: None) for _ in range(2)]
    for now in range(1, num_actions + 1):
        chosen = dice.sample(list(slots), dice.randint(0, len(slots)))
        match dice.choice(
            ["give", "give", "back", "open", "add", "add", "add", "put", "ask", "tell", "join", "read", "close", "count"]
        ):
            case "give":
                for _ in range(dice.choice([1, 1, 20])):
                    owner = Owner(frozenset(dice.sample(range(6), dice.randint(0, 2))))
                    slots[owner] = unread.give(owner, owner.ending, owner.last_at)
            case "back":
                for owner in chosen[:2]:
                    unread.take_back(slots.pop(owner))
            case "open":
                for owner in chosen:
                    owner.num_left = dice.randint(0, 5)
                    slots[owner].open(owner.num_left)
            case "add":
                tokens = [dice.randrange(6) for _ in chosen]
                at = [slots[owner].at for owner in chosen] + [NO_SLOT] * 2
                added = unread.add(np.array(at), np.array([*tokens, 1, 2]), now)
                takes = [owner.takes(token_id) for owner, token_id in zip(chosen, tokens, strict=True)]
                endings = {token_id for owner in slots for token_id in owner.ending}
                for token_id, is_added, may in zip(tokens, added.is_added, takes, strict=False):
                    assert is_added == (may and token_id not in endings), "another's end may cost a call, never a token"
                assert not added.is_added[-2:].any()
                taking = [owner for owner, is_added in zip(chosen, added.is_added, strict=False) if is_added]
                assert added.gaps.tolist() == [now - owner.last_at for owner in taking]
                assert {unread.owners[slot] for slot in added.untold} == {owner for owner in taking if not owner.is_told}
                for owner, token_id, is_added in zip(chosen, tokens, added.is_added, strict=False):
                    if is_added:
                        owner.take(token_id, now)
            case "put":
                for owner in chosen:
                    may = owner.takes(token_id := dice.randrange(6))
                    assert slots[owner].put(token_id) == may
                    if may:
                        owner.take(token_id, now)
                        slots[owner].note_time(now)
            case "ask":
                for owner in chosen:
                    owner.is_told = False
                    assert slots[owner].take() == owner.unread
                    owner.unread.clear()
            case "tell":
                due = [owner for owner in chosen if owner.unread and not owner.is_told]
                if dice.random() < 0.5:
                    told = unread.tell(np.array([slots[owner].at for owner in chosen], np.int64))
                    alone = [owner for owner in due if owner.reader is None]
                    assert told[: len(alone)] == alone
                    assert len(told) == len(set(told)), "a reader of many is told once"
                    assert set(told[len(alone) :]) == {owner.reader for owner in due} - {None}
                else:
                    assert [owner for owner in chosen if slots[owner].tell()] == due
                for owner in due:
                    owner.is_told = True
            case "join":
                for owner in chosen:
                    owner.reader, owner.number = dice.choice(readers), now * 100 + slots[owner].at
                    owner.reader.join(slots[owner], owner.number)
            case "read":
                reader = dice.choice(readers)
                own = [owner for owner in slots if owner.reader is reader]
                assert by_number(reader.take()) == {owner.number: owner.unread for owner in own if owner.unread}
                for owner in own:
                    owner.is_told, owner.unread = False, []
            case "close":
                reader = dice.choice(readers)
                reader.close()
                for owner in slots:
                    owner.reader = None if owner.reader is reader else owner.reader
            case "count":
                for owner in chosen:
                    assert slots[owner].take_num_added() == owner.num_added
                    owner.num_added = 0
        for owner, slot in slots.items():
            assert slot.num_added == owner.num_added
            assert unread.owners[slot.at] is owner
            assert (slot.num_unread, slot.last_at) == (len(owner.unread), owner.last_at)
        assert len({slot.at for slot in slots.values()} | {NO_SLOT}) == len(slots) + 1


@given(st.lists(st.integers(1, 5), max_size=20), st.integers(1, 12))
def test_pieces_of_columns_are_whole_requests_in_order_and_not_much_larger(counts: list[int], most: int) -> None:
    numbers, tokens = np.arange(len(counts), dtype=np.uint64), np.arange(sum(counts), dtype=np.int32)
    whole = PlainColumns(numbers, np.array(counts, np.int64), tokens)
    pieces = list(whole.split(most))
    assert [one for piece in pieces for one in by_number(piece).items()] == list(by_number(whole).items())
    assert all(0 < len(piece.token_ids) < most + 5 for piece in pieces)
