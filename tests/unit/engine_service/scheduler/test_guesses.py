"""Guessed tokens in the scheduler: outputs stay what they are, slots of wrong guesses are used again, limits hold."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.slices import scaled
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, make_request, next_token

pytestmark = pytest.mark.usefixtures("each_cache")


def right_guess(tokens: tuple[int, ...], index: int, count: int) -> list[int]:
    """What really follows."""
    made = list(tokens)
    for _ in range(count):
        made.append(next_token(tuple(made), index))
    return made[len(tokens) :]


def test_right_guesses_save_steps_and_the_last_token_is_not_overrun() -> None:
    plain, guessing = World(), World(guess=lambda tokens, index: right_guess(tokens, index, 4))
    for world in (plain, guessing):
        world.submit(make_request([1, 2, 0], 12, n=2))
        world.run()
        world.check_outputs()
    assert guessing.num_kept == guessing.num_guessed > 0
    assert guessing.num_steps < plain.num_steps - 6


def test_wrong_guesses_change_nothing_but_the_work() -> None:
    world = World(guess=lambda tokens, index: [(token + 1) % 3 for token in right_guess(tokens, index, 4)])
    world.submit(make_request([1, 2, 0], 9, n=2))
    world.run()
    world.check_outputs()
    assert world.num_guessed > world.num_kept == 0


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_guesses_stay_within_the_budget(budget: int) -> None:
    world = World(token_budget=budget, guess=lambda tokens, index: right_guess(tokens, index, 4))
    for place in range(3):
        world.submit(make_request([place], 6))
    while world.busy:
        assert int(world.step().num_new.sum()) <= budget
    world.check_outputs()


@settings(max_examples=scaled(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(12, 40),
    block_size=st.integers(1, 4),
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=5),
)
def test_the_outputs_are_the_same_with_any_guesses(
    seed: int, num_blocks: int, block_size: int, requests: list[tuple[int, int, int]]
) -> None:
    """On the real core, with little room: forks, preemptions, prefix hits and rejected slots meet."""
    dice = random.Random(seed)

    def guess(tokens: tuple[int, ...], index: int) -> list[int]:
        made = right_guess(tokens, index, dice.randrange(6))
        return [token if dice.random() < 0.7 else dice.randrange(3) for token in made]

    world = World(num_blocks, block_size, guess=guess, make_cache=CoreCache)
    for length, new, n in requests:
        if length + new <= world.limits.max_len:
            world.submit(make_request([dice.randrange(3) for _ in range(length)], new, n=n))
    world.run()
    world.check_outputs()
