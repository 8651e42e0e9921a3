"""Requests that leave one engine's scheduler with their tokens, and enter another's, with blocks or without."""

import numpy as np
import pytest

from kvkeeper.engine_service.scheduler.limits import Limits
from kvkeeper.engine_service.scheduler.scheduler import Scheduler
from kvkeeper.engine_service.values.request import HeldTokens, Request, SequenceState, TakenBlocks
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, make_request

LIMITS = Limits(block_size=2, max_len=50, max_known_sequences=10, max_running=1)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def two_that_run_on() -> tuple[Request, dict[int, TakenBlocks]]:
    request = make_request([1, 2, 0], 9, n=2)
    request.start_over([HeldTokens(0, int32(1, 2, 0, 1)), HeldTokens(1, int32(1, 2, 0, 2))])
    return request, {0: TakenBlocks(5, 4, 3, 4, int32(7, 8)), 1: TakenBlocks(6, 4, 3, 4, int32(9, 10))}


def test_blocks_come_along_as_far_as_there_are_rows() -> None:
    scheduler = Scheduler(LIMITS)
    request, taken = two_that_run_on()
    scheduler.add(request, 0.0, taken)
    assert not scheduler.is_empty
    scheduler.enter()
    first, second = request.sequences
    assert (first.state, second.state) == (SequenceState.RUNNING, SequenceState.NEW)
    plan = scheduler.schedule(0.0)
    assert (plan.reserve_ids.tolist(), plan.reserve_min.tolist()) == ([5], [4]), "it computes its last token, and no other"
    assert plan.release_ids.tolist() == [6]
    assert scheduler.waiting.num_known == 2
    assert (scheduler.running.num_left[first.row], second.num_output) == (8, 1)


@pytest.mark.parametrize("end", ["cancelled", "the session is new"])
def test_what_has_not_entered_yet_loses_its_blocks(end: str) -> None:
    scheduler = Scheduler(LIMITS)
    request, taken = two_that_run_on()
    scheduler.add(request, 0.0, taken)
    if end == "cancelled":
        for sequence in request.sequences:
            scheduler.end_sequence(sequence)
        scheduler.enter()
        assert scheduler.schedule(0.0).release_ids.tolist() == [5, 6]
        return
    assert scheduler.reset(LIMITS) == []
    scheduler.enter()
    assert scheduler.waiting.num_known == 0
    assert scheduler.schedule(0.0).release_ids.tolist() == [], "another session's ids mean nothing here"
    assert list(scheduler.waiting.sequences) == list(request.sequences)


def test_blocks_that_a_request_brings_back_are_its_own_from_then_on() -> None:
    scheduler = Scheduler(LIMITS)
    request, taken = two_that_run_on()
    held = [HeldTokens(each.index, each.token_ids) for each in request.sequences]
    scheduler.add(request, 0.0)
    scheduler.take_out(request)
    request.start_over(held)
    assert scheduler.num_waiting == 0
    scheduler.put_back(request, {0: taken[0]})
    scheduler.enter()
    assert [each.state for each in request.sequences] == [SequenceState.RUNNING, SequenceState.NEW]
    assert scheduler.num_waiting == 1


def test_blocks_that_were_taken_in_vain_are_released() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.drop_taken(two_that_run_on()[1])
    assert scheduler.schedule(0.0).release_ids.tolist() == [5, 6]
    assert scheduler.waiting.num_known == 2, "until the cache service has answered"


@pytest.mark.parametrize("keeps_blocks", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_is_taken_out_goes_on_where_it_was(n: int, keeps_blocks: bool) -> None:
    world = World(make_cache=CoreCache, overlap=True)
    request = world.submit(make_request([1, 2, 0, 1, 2], 12, n=n))
    while request.sequences[-1].state is not SequenceState.RUNNING:
        world.step()
    world.step()
    kept = world.scheduler.take_out(request, keeps_blocks=keeps_blocks)
    assert len(kept) == (n if keeps_blocks else 0)
    held = [len(sequence.token_ids) for sequence in request.sequences]
    world.outputs |= {sequence: sequence.token_ids[len(request.prompt) :].tolist() for sequence in request.sequences}
    for _ in range(3):
        world.step()
    assert set(world.scheduler.running.sequences) - {None} == set(kept), "the others are released"
    assert [len(sequence.token_ids) for sequence in request.sequences] == held, "nothing is computed for it"
    for sequence in kept:
        world.scheduler.let_go(sequence, is_taken=False)
    world.scheduler.put_back(request)
    world.run()
    world.check_outputs()
