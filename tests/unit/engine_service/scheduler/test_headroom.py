"""What the scheduler concludes from answers of no room: which gives way, and for how many answers blocks count as coming."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvkeeper.engine_service.scheduler.headroom import CRITICAL, Headroom
from kvkeeper.engine_service.values.request import Request, Sequence
from tests.support.worlds.scheduler_world import make_request, tiered


def running(*priorities: int) -> list[Sequence]:
    return [Request("r", np.array([1], np.int32), 2, priority=priority).sequences[0] for priority in priorities]


def short(num_reclaim_hint: int = 0, num_fenced: int = 0) -> Any:
    return SimpleNamespace(num_free=0, num_evictable=0, num_reclaim_hint=num_reclaim_hint, num_fenced=num_fenced)


@pytest.mark.parametrize("num_reclaim_hint", [0, 2])
def test_the_blocks_of_a_swap_out_are_waited_for_three_answers_and_no_more(num_reclaim_hint: int) -> None:
    """One takes the orders, one comes while they are run, one is told: a fourth would only keep all others waiting."""
    room, sequences = Headroom(), running(0, 0)
    answer = short(num_reclaim_hint)
    room.note_answer(answer)
    room.note_swap_out(2)
    for _ in range(2):
        room.note_answer(answer)
        assert room.choose_victim(sequences, answer, is_stuck=False) is None
    room.note_answer(answer)
    assert room.choose_victim(sequences, answer, is_stuck=False) is sequences[-1]


def test_the_blocks_of_a_release_are_waited_for_one_answer() -> None:
    room, sequences, answer = Headroom(), running(0, 0), short()
    room.note_release(2)
    assert room.choose_victim(sequences, answer, is_stuck=False) is None
    room.note_answer(answer)
    assert room.choose_victim(sequences, answer, is_stuck=False) is sequences[-1]


def test_of_several_that_are_coming_each_has_its_own_time() -> None:
    room, sequences, answer = Headroom(), running(0, 0), short(num_reclaim_hint=3)
    room.note_swap_out(2)
    room.note_answer(answer)
    room.note_swap_out(1)
    assert room.choose_victim(sequences, answer, is_stuck=False) is None, "two and one are coming"
    for _ in range(2):
        room.note_answer(answer)
    assert room.choose_victim(sequences, answer, is_stuck=False) is sequences[-1], "two did not come"


def test_fenced_blocks_are_waited_for_one_answer_and_again_after_growth() -> None:
    room, sequences, answer = Headroom(), running(0, 0), short(num_fenced=1)
    for _ in range(2):
        assert room.choose_victim(sequences, answer, is_stuck=False) is None
        room.note_growth()
    assert room.choose_victim(sequences, answer, is_stuck=False) is None
    assert room.choose_victim(sequences, answer, is_stuck=False) is sequences[-1]


def test_a_critical_one_gives_way_only_where_nothing_could_go_on() -> None:
    room, sequences, answer = Headroom(), running(CRITICAL, CRITICAL), short()
    assert room.choose_victim(sequences, answer, is_stuck=False) is None
    assert room.choose_victim(sequences, answer, is_stuck=True) is sequences[-1]


@pytest.mark.parametrize("overlap", [False, True])
def test_in_the_third_answer_after_it_the_blocks_of_a_swap_out_have_come(overlap: bool) -> None:
    """So that waiting for three is enough, also where a step is computed while the next is asked for."""
    world = tiered(num_blocks=9, block_size=2, overlap=overlap)
    first = world.submit(make_request([1, 2, 0], 12, look_up=False))
    world.submit(make_request([2, 1, 0], 12, look_up=False))
    while not world.scheduler.state.num_swapped_out and world.scheduler.state.num_preemptions == 0:
        world.step()
    headroom = world.scheduler.state.headroom
    assert len(headroom._coming) == 1
    num_answers = 0
    while headroom._coming:
        world.step()
        num_answers += 1
    assert num_answers == 3
    own = int(world.scheduler.running.num_blocks[first.sequences[0].row])
    assert headroom._num_available is not None
    assert headroom._num_available >= world.num_usable_blocks - own, "all that the other does not hold"
    world.run()
    world.check_outputs()
