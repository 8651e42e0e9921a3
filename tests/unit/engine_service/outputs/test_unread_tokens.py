"""Columns of unread tokens against lists: whatever is added, asked for and given back, each reader gets its own tokens."""

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.outputs.unread_tokens import UnreadSlot, UnreadTokens
from kvkeeper.engine_service.values.output_chunk import TokenColumns
from kvkeeper.engine_service.values.request import NO_SLOT
from tests.support.slices import scaled

WIDTH = 3


class Reader:
    """num_notified: times that it heard of something since it was asked for."""

    num_notified = 0

    def notify(self) -> None:
        self.num_notified += 1


@dataclass(eq=False)
class Owner:
    """A request, and the tokens that its slot should have."""

    ending: frozenset[int]
    num_left: int = 0
    unread: list[int] = field(default_factory=list)
    last_at: float = 0.0
    num_added: int = 0
    reader: Reader | None = None
    number: int = 0

    def takes(self, token_id: int) -> bool:
        return self.num_left > 0 and len(self.unread) < WIDTH and token_id not in self.ending

    def take(self, token_id: int, now: float) -> None:
        self.unread.append(token_id)
        self.num_left, self.last_at, self.num_added = self.num_left - 1, now, self.num_added + 1


def by_number(columns: TokenColumns) -> dict[int, list[int]]:
    """The tokens of each request."""
    numbers, tokens, found = columns.numbers.tolist(), columns.token_ids.tolist(), dict[int, list[int]]()
    for number, count in zip(numbers, columns.counts.tolist(), strict=True):
        found[number], tokens = tokens[:count], tokens[count:]
    assert not tokens
    return found


@settings(max_examples=scaled(100), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_each_reader_gets_its_own_tokens(seed: int, num_actions: int) -> None:
    dice = random.Random(seed)
    unread = UnreadTokens(WIDTH)
    slots: dict[Owner, UnreadSlot] = {}
    readers = [Reader(), Reader()]
    with_more = set[Reader | None]()  # readers that have not heard of it
    for now in range(1, num_actions + 1):
        chosen = dice.sample(list(slots), dice.randint(0, len(slots)))
        match dice.choice(
            ["give", "give", "back", "open", *["add"] * 3, "put", "take", "notify", "join", "read", "close", "count"]
        ):
            case "give":
                for _ in range(dice.choice([1, 1, 20])):
                    owner = Owner(frozenset(dice.sample(range(6), dice.randint(0, 2))))
                    slots[owner] = unread.give(owner.ending, owner.last_at)
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
                with_more |= {owner.reader for owner in taking}
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
                        with_more.add(owner.reader)
            case "take":
                for owner in chosen:
                    assert slots[owner].take() == owner.unread
                    owner.unread.clear()
            case "notify":
                unread.notify_readers()
                assert [reader.num_notified for reader in readers] == [int(reader in with_more) for reader in readers]
                with_more.clear()
                for reader in readers:
                    reader.num_notified = 0
            case "join":
                for owner in chosen:
                    owner.reader, owner.number = dice.choice(readers), now * 100 + slots[owner].at
                    slots[owner].join(owner.reader, owner.number)
            case "read":
                reader = dice.choice(readers)
                own = [owner for owner in slots if owner.reader is reader]
                assert by_number(unread.take_columns(reader)) == {owner.number: owner.unread for owner in own if owner.unread}
                for owner in own:
                    owner.unread = []
            case "close":
                reader = dice.choice(readers)
                unread.drop_reader(reader)
                with_more.discard(reader)
                for owner in slots:
                    owner.reader = None if owner.reader is reader else owner.reader
            case "count":
                for owner in chosen:
                    assert slots[owner].take_num_added() == owner.num_added
                    owner.num_added = 0
        for owner, slot in slots.items():
            assert slot.num_added == owner.num_added
            assert (slot.num_unread, slot.last_at) == (len(owner.unread), owner.last_at)
        assert len({slot.at for slot in slots.values()} | {NO_SLOT}) == len(slots) + 1
