"""Most steps are plain ones; which are not. That plain ones are what they would be otherwise is checked in all tests here."""

from collections import Counter
from typing import Any

import pytest

from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, make_request


def run(world: World) -> None:
    while world.busy:
        world.step()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_steps_of_a_crowd_are_plain_but_where_one_comes_or_goes(num_plain: Counter[str], ahead: bool) -> None:
    world = World(num_blocks=256, make_cache=CoreCache, ahead=ahead)
    for index in range(8):
        world.submit(make_request([index, 1, 2], max_new_tokens=20))
    run(world)
    assert num_plain["plan"] >= 14
    assert num_plain["work"] >= num_plain["plan"] - 2


def test_what_waits_for_a_row_leaves_steps_plain(num_plain: Counter[str]) -> None:
    world = World(num_blocks=256, max_running=2)
    for index in range(3):
        world.submit(make_request([index, 1, 2], max_new_tokens=20))
    run(world)
    assert num_plain["work"] >= 30


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"guess": lambda tokens, index: [0]}, {}),
        ({"decode_budget": 2}, {}),
        ({}, {"n": 3}),
    ],
    ids=["guesses", "turns", "continuations"],
)
def test_what_is_not_plain_goes_the_other_way(num_plain: Counter[str], options: dict[str, Any], fields: dict[str, Any]) -> None:
    world = World(num_blocks=256, **options)
    for index in range(3):
        world.submit(make_request([index, 1, 2], max_new_tokens=8, **fields))
    for _ in range(3):
        world.step()
    assert not num_plain
    run(world)
