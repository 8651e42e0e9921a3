"""Steps that overlap: planned while the last one is computed, on tokens that have not come and sequences that may end.

Those that run ahead are launched then, too: their tokens come from the device, and an end that is seen late has cost a row.
"""

import numpy as np
import pytest

from kvkeeper.engine_service.values.request import Request, SequenceState
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, make_request


def overlapping(num_blocks: int = 64, block_size: int = 2, **options: object) -> World:
    return World(num_blocks, block_size, make_cache=CoreCache, overlap=True, **options)  # type: ignore[arg-type]


both = pytest.mark.parametrize("ahead", [False, True])


@both
def test_it_computes_what_it_would_have(ahead: bool) -> None:
    world = overlapping(chunk_size=4, ahead=ahead)
    world.submit(make_request([1, 2, 0, 1, 2, 0, 1], 6, n=2))
    world.submit(make_request([2, 2], 5))
    world.run()
    world.check_outputs()
    assert max(world.computed.values()) == 1, "nothing twice"
    assert (world.num_ahead > 3) == ahead


@both
def test_a_known_end_is_not_planned_past(ahead: bool) -> None:
    world = overlapping(ahead=ahead)
    world.submit(make_request([1, 2, 0], 4))
    world.run()
    assert len(world.computed) == 3 + 4 - 1
    assert not world.num_late


@both
def test_what_was_cancelled_while_its_first_tokens_are_computed_stays_ended(ahead: bool) -> None:
    world = overlapping(ahead=ahead)
    request = world.submit(make_request([1, 2, 0], 5, n=3))
    world.step()
    world.cancel(request)
    for _ in range(4):
        world.step()
        assert {sequence.state for sequence in request.sequences} == {SequenceState.ENDED}
    assert not world.scheduler.running.by_id
    assert not world.cache.sequences


def test_an_end_that_is_seen_late_costs_one_row_and_leaves_nothing() -> None:
    world = overlapping(num_blocks=20, ahead=True)
    request = world.submit(make_request([1, 2, 0], 20))
    world.submit(make_request([0, 1], 9))
    world.stop_after[request.sequences[0]] = 3
    world.run()
    world.check_outputs()
    assert world.num_late == 1
    again = world.submit(make_request([1, 2, 0, *world.outputs[request.sequences[0]]], 5))
    world.run()
    world.check_outputs()
    assert again.num_hit_tokens == 4, "full blocks before the last token, of which nothing was committed"


def test_a_row_that_came_to_another_sequence_is_not_touched_by_the_late_step() -> None:
    world = overlapping(ahead=True, max_running=1)
    for stop in (2, 3):
        request = world.submit(make_request([1, 2, 0], 20))
        world.stop_after[request.sequences[0]] = stop
    world.submit(make_request([1, 1], 4))
    world.run()
    world.check_outputs()
    assert world.num_late == 2


def test_an_unforeseen_end_costs_a_reservation_and_no_more() -> None:
    world = overlapping()
    request = world.submit(make_request([1, 2, 0], 20))
    other = world.submit(make_request([0, 1], 9))
    world.stop_after[request.sequences[0]] = 3
    world.run()
    world.check_outputs()
    assert len(world.outputs[other.sequences[0]]) == 9
    assert sum(count for (arrival, _, _), count in world.computed.items() if arrival == 0) == 3 + 3 - 1


def test_what_is_drawn_for_a_sequence_that_has_ended_is_not_its() -> None:
    """Nor when its request was taken out of the steps alone, and goes on later from the tokens that it had then."""
    world = overlapping(ahead=True)
    request = world.submit(make_request([1, 2, 0], 9))
    scheduler, cache = world.scheduler, world.cache
    sequence, works = request.sequences[0], []
    while (created := scheduler.next_to_create()) is not None:
        assert created.sequence_id is not None
        cache.create(created.sequence_id, created.token_ids.tolist(), request.max_len)
        scheduler.waiting.created(created)
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        answer = cache.step(plan)
        assert not works or scheduler.find_wait(plan, answer) is None
        works.append(scheduler.apply(plan, answer))
        cache.has_step_in_flight = True
    assert [own.tolist() for own in scheduler.advance(works[0], np.array([2], np.int32))] == [[2]]
    scheduler.take_out(request)
    assert [own.tolist() for own in scheduler.advance(works[1], np.array([1], np.int32))] == [[]]
    assert (sequence.num_output, scheduler.get_tokens(sequence).tolist()) == (1, [1, 2, 0, 2])
    assert request.sequences[0].token_ids.tolist() == [1, 2, 0, 2]


def constrained(prompt: list[int], max_new_tokens: int) -> Request:
    request = make_request(prompt, max_new_tokens)
    request.is_constrained = True
    return request


def test_a_sequence_with_a_constraint_draws_in_every_second_step_and_the_others_run_ahead() -> None:
    world = overlapping(num_blocks=200, ahead=True)
    others = [world.submit(make_request([1, 2, first % 3], 40)) for first in range(3)]
    one = world.submit(constrained([2, 0], 40))
    while any(len(world.outputs[other.sequences[0]]) < 40 for other in others):
        world.step()
    assert world.num_ahead >= 0.9 * world.num_steps
    assert 15 <= len(world.outputs[one.sequences[0]]) <= 25
    world.run()
    world.check_outputs()
    assert max(world.computed.values()) == 1, "nothing twice"


def test_where_most_have_constraints_all_wait_for_their_tokens() -> None:
    world = overlapping(num_blocks=200, ahead=True)
    for first in range(3):
        world.submit(constrained([1, 2, first], 20))
    world.submit(make_request([2, 0], 20))
    world.run()
    world.check_outputs()
    assert world.num_ahead <= 3
    assert world.num_steps <= 30, "each gets a token in every step"


def test_without_steps_that_run_ahead_a_constraint_holds_up_nothing() -> None:
    world = overlapping(num_blocks=200)
    world.scheduler.state.runs_ahead = False
    for first in range(3):
        world.submit(make_request([1, 2, first], 20))
    world.submit(constrained([2, 0], 20))
    world.run()
    world.check_outputs()
    assert world.num_steps <= 30
