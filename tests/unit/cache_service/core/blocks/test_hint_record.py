"""Whose hints count: what came of those before, by a pool of few blocks of one token each."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.blocks import hint_record
from kvkeeper.cache_service.core.blocks.hint_record import JUDGED_SPAN, MOST_WATCHED, TURNOVERS, HintRecord
from kvkeeper.cache_service.core.values.types import ReuseHint

ANY, NONE, SOON = ReuseHint.UNSPECIFIED, ReuseHint.NONE, ReuseHint.SOON
NUM_BLOCKS = 10
A, B = -1, -2  # tenants' roots


class Watched:
    """A record of ends that each have a digest of their own."""

    def __init__(self) -> None:
        self.record = HintRecord(NUM_BLOCKS)
        self.last = 0

    def say(self, hint: ReuseHint, *, goes_on: bool, root: int = A) -> None:
        """A hint, and what comes of it."""
        self.last += 1
        self.record.watch(root, self.last, hint, 0.0, 0.0)
        if goes_on:
            self.go_on(self.last)
        else:
            self.turn_over()

    def go_on(self, digest: int) -> None:
        self.record.note_path(np.array([7777, digest], np.uint64))

    def turn_over(self, now: float = 0.0) -> None:
        self.record.num_published += TURNOVERS * NUM_BLOCKS
        self.record.watch(A, 10**6, ANY, 0.0, now)


@pytest.mark.parametrize("hint", [NONE, SOON])
def test_hints_that_are_wrong_count_no_longer_until_they_are_right_again(hint: ReuseHint) -> None:
    watched, wrong, right = Watched(), hint is NONE, hint is SOON
    assert watched.record.is_trusted(A, hint)
    for _ in range(JUDGED_SPAN):
        watched.say(hint, goes_on=wrong)
    assert not watched.record.is_trusted(A, hint)
    for _ in range(JUDGED_SPAN):
        watched.say(hint, goes_on=right)
    assert watched.record.is_trusted(A, hint)


def test_a_few_wrong_hints_among_right_ones_change_nothing() -> None:
    watched = Watched()
    for number in range(100):
        watched.say(SOON, goes_on=number % 3 != 0)
        assert watched.record.is_trusted(A, SOON)


def test_wrong_hints_cost_a_tenant_the_trust_in_this_kind_alone_and_no_other_tenant_any() -> None:
    watched = Watched()
    for _ in range(JUDGED_SPAN):
        watched.say(SOON, goes_on=False, root=B)
    trusted = {(root, hint): watched.record.is_trusted(root, hint) for root in (A, B) for hint in (NONE, SOON)}
    assert trusted == {(A, NONE): True, (A, SOON): True, (B, NONE): True, (B, SOON): False}


def test_what_is_said_again_is_watched_since_the_first_time() -> None:
    watched = Watched()
    for _ in range(JUDGED_SPAN):
        for _ in range(TURNOVERS):
            watched.record.watch(A, 1, SOON, 0.0, 0.0)
            watched.record.num_published += NUM_BLOCKS
    watched.turn_over()
    assert not watched.record.is_trusted(A, SOON)


def test_what_is_taken_back_is_not_judged() -> None:
    watched = Watched()
    for number in range(2 * JUDGED_SPAN):
        watched.record.watch(A, number, SOON, 0.0, 0.0)
        watched.record.watch(A, number, ANY, 0.0, 0.0)
        watched.turn_over()
    assert watched.record.is_trusted(A, SOON)


def test_too_many_ends_are_forgotten_without_a_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_WATCHED >= 1000
    monkeypatch.setattr(hint_record, "MOST_WATCHED", 4)
    watched = Watched()
    for number in range(100):
        watched.record.watch(A, number, SOON, 0.0, 0.0)
    assert len(watched.record._of_digest) == 4
    watched.turn_over()
    assert watched.record.is_trusted(A, SOON)
    assert len(watched.record._of_digest) == 0


def test_what_is_retained_for_a_time_is_judged_when_that_is_over_too() -> None:
    watched = Watched()
    for number in range(JUDGED_SPAN):
        watched.record.watch(A, number, SOON, 60.0, 10.0)
    for now in (11.0, 69.9):
        watched.turn_over(now)
        assert watched.record.is_trusted(A, SOON)
    watched.turn_over(70.0)
    assert not watched.record.is_trusted(A, SOON)


def test_a_longer_time_is_a_new_hint_and_a_shorter_one_is_none() -> None:
    watched = Watched()
    for number in range(JUDGED_SPAN):
        for seconds in (60.0, 600.0, 1.0):
            watched.record.watch(A, number, SOON, seconds, 0.0)
    assert len(watched.record._of_digest) == JUDGED_SPAN
    watched.turn_over(599.0)
    assert watched.record.is_trusted(A, SOON)
    watched.turn_over(600.0)
    assert not watched.record.is_trusted(A, SOON)
