"""Guessing: what is found, what is kept, how far ahead, and when it is not worth it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.scheduler.drawn_tokens import num_kept
from kvkeeper.engine_service.speculation.speculator import (
    FIRST_AHEAD,
    LEAST_AHEAD,
    MOST_AHEAD,
    LookAhead,
    Switch,
    look_up,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def naive_look_up(history: list[int], most: int) -> list[int]:
    for width in (4, 3, 2):
        for start in range(len(history) - width - 1, -1, -1):
            if width < len(history) and history[start : start + width] == history[-width:]:
                return history[start + width : start + width + most]
    return []


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=24), st.integers(0, 8))
def test_what_followed_the_longest_and_latest_match(history: list[int], most: int) -> None:
    assert look_up(ids(*history), most).tolist() == naive_look_up(history, most)


def test_one_token_alone_is_no_match() -> None:
    assert look_up(ids(5, 1, 2, 3, 5), 4).tolist() == []
    assert look_up(ids(4, 5, 1, 2, 3, 4, 5), 4).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("guesses", "drawn", "kept"), [((), (7,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (1, 9, 3), 1), ((1, 2), (9, 2, 3), 0)]
)
def test_guesses_are_kept_up_to_the_first_that_differs(guesses: tuple[int, ...], drawn: tuple[int, ...], kept: int) -> None:
    assert num_kept(ids(*guesses), ids(*drawn)) == kept


def test_a_sequence_guesses_further_while_that_works_and_rests_when_it_does_not() -> None:
    ahead = LookAhead()
    assert ahead.most(0) == FIRST_AHEAD
    for _ in range(5):
        ahead.note(ahead.num_ahead, ahead.num_ahead, 10)
    assert ahead.most(10) == MOST_AHEAD
    for _ in range(3):
        ahead.note(ahead.num_ahead, 0, 20)
        assert ahead.most(20) > 0
    ahead.note(ahead.num_ahead, 0, 20)
    assert ahead.most(20) == 0
    assert ahead.most(51) == 0
    assert LEAST_AHEAD <= ahead.most(52) < MOST_AHEAD


def run(switch: Switch, num_steps: int, with_guesses: float, without: float) -> int:
    """Steps that guessed, where a token takes so many seconds with guesses and without."""
    guessed = 0
    for _ in range(num_steps):
        is_on = switch.is_on
        guessed += is_on
        seconds = (with_guesses if is_on else without) * 10
        switch.note(4 if is_on else 0, 2 if is_on else 0, 10, seconds, was_guessing=is_on)
    return guessed


def test_it_turns_itself_off_where_it_is_slower_and_on_again_when_that_changes() -> None:
    switch = Switch()
    assert 8 <= run(switch, 300, with_guesses=2.0, without=1.0) < 40
    assert run(switch, 2000, with_guesses=0.5, without=1.0) > 1500
    assert run(switch, 2000, with_guesses=2.0, without=1.0) < 500
    assert switch.acceptance_rate == 0.5


def test_looking_in_vain_has_its_price() -> None:
    """Steps that wait for guesses and get none take longer than those that do not wait: guessing is turned off."""
    switch, num_waited = Switch(), 0
    for _ in range(300):
        is_on = switch.is_on
        num_waited += is_on
        switch.note(0, 0, 1, 1.2 if is_on else 1.0, was_guessing=is_on)
    assert 8 <= num_waited < 40


def test_a_long_run_of_kept_guesses_makes_up_for_several_steps_without_one() -> None:
    """Waiting steps take 1.2 and give now 1 token, now 5: 0.4 a token, though the mean of their quotients is above 0.7."""
    switch, num_waited = Switch(), 0
    for step in range(600):
        is_on = switch.is_on
        num_waited += is_on
        num_tokens = (1 if step % 2 else 5) if is_on else 1
        switch.note(4 if is_on else 0, num_tokens - 1, num_tokens, 1.2 if is_on else 0.7, was_guessing=is_on)
    assert num_waited > 500


def test_a_step_that_the_machine_held_up_does_not_change_its_mind() -> None:
    switch, num_waited = Switch(), 0
    for step in range(2000):
        is_on = switch.is_on
        num_waited += is_on
        seconds = (1.3 if is_on else 1.0) * (20 if step % 50 == 49 else 1)
        switch.note(0, 0, 1, seconds, was_guessing=is_on)
    assert num_waited < 120


def test_a_stretch_without_a_match_does_not_turn_it_off() -> None:
    """Fourteen steps give 5 tokens each, fourteen look in vain, and so on: 0.42 a token on the whole, against 1."""
    switch, num_waited = Switch(), 0
    for _ in range(1200):
        is_on = switch.is_on
        num_waited += is_on
        num_tokens = 5 if is_on and num_waited % 28 < 14 else 1
        switch.note(4 if is_on else 0, num_tokens - 1, num_tokens, 1.25 if is_on else 1.0, was_guessing=is_on)
    assert num_waited > 1100
