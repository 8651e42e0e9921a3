"""Preemption by swap, on the real core: a sequence comes back to the token it was at, through failures too."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.engine_service.scheduler.headroom import Preemption
from kvkeeper.engine_service.scheduler.plan import Plan
from kvkeeper.engine_service.values.request import Request, RequestState, SequenceState
from tests.support.worlds.scheduler_world import World, make_request, tiered

AWAY = (SequenceState.LEAVING, SequenceState.SWAPPED, SequenceState.RETURNING)
both = pytest.mark.parametrize("overlap", [False, True])


def two(world: World, length: int = 3) -> tuple[Request, Request]:
    """Two that do not fit together to their ends; the second finds nothing cached."""
    old = world.submit(make_request([1, 2, 0, 1], 9))
    return old, world.submit(make_request([2, 2, 1, 0, 2][:length], 9, look_up=False))


def until(world: World, request: Request, state: SequenceState) -> None:
    while request.sequences[0].state is not state:
        assert world.num_steps < 100, f"never {state}"
        world.step()


@both
@pytest.mark.parametrize("length", [3, 4, 5])
def test_it_goes_on_from_the_token_that_it_was_at(length: int, overlap: bool) -> None:
    world = tiered(overlap=overlap)
    old, young = two(world, length)
    world.run()
    world.check_outputs()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1), "equals do not take turns"
    assert world.scheduler.state.num_swapped_out == 1
    assert world.num_moved > 0
    assert max(world.computed.values()) == 1, "nothing is computed twice"


@both
def test_what_is_swapped_out_is_not_computed(overlap: bool) -> None:
    world = tiered(overlap=overlap)
    _, young = two(world)
    seen, counts = [], []
    while world.busy:
        work = world.step()
        state = young.sequences[0].state
        if state in AWAY:
            seen.append(state)
            counts.append(sum(count for (arrival, _, _), count in world.computed.items() if arrival == 1))
            assert young.sequences[0] not in work.sequences
            assert young.state is RequestState.PREEMPTED
    world.check_outputs()
    assert set(seen) == set(AWAY)
    assert len(set(counts)) == 1, "all that was in flight had ended when it was chosen"


@both
def test_a_prompt_half_computed_goes_on_there(overlap: bool) -> None:
    world = tiered(num_blocks=13, chunk_size=2, token_budget=6, overlap=overlap)
    world.submit(make_request([1, 2, 0, 1], 16))
    world.submit(make_request([2, 1], 16))
    for _ in range(8):
        world.step()
    long = world.submit(make_request([2, 2, 1, 0, 1, 2, 1, 0, 2, 2, 0], 4, n=2, look_up=False))
    until(world, long, SequenceState.SWAPPED)
    assert 0 < long.sequences[0].num_computed < len(long.prompt)
    world.run()
    world.check_outputs()
    assert all(count == 1 for (arrival, _, _), count in world.computed.items() if arrival == 2)


def test_a_swap_is_told_in_the_steps_that_it_happens_in() -> None:
    world = tiered()
    _, young = two(world)
    out, back = [], []
    while world.busy:
        changes = world.step().changes
        assert not changes.preempted
        out += [(task.sequence, task.num_context) for task in changes.swapped_out]
        back += [(task.sequence, task.num_context) for task in changes.swapped_in]
    assert out == back
    assert [sequence for sequence, _ in out] == [young.sequences[0]]
    assert out[0][1] > 0


@both
@pytest.mark.parametrize("num_host_blocks", [0, 2, 3])
def test_without_room_in_the_host_tier_it_is_computed_again(num_host_blocks: int, overlap: bool) -> None:
    world = tiered(num_host_blocks=num_host_blocks, overlap=overlap)
    if num_host_blocks == 3:  # the tier is large enough, and full
        world.scheduler.state.limits = dataclasses.replace(world.limits, num_host_blocks=40)
    _, young = two(world)
    preempted = []
    while world.busy:
        preempted += world.step().changes.preempted
    world.check_outputs()
    assert preempted == [young.sequences[0]]
    assert (young.num_preemptions, world.scheduler.state.num_preemptions, world.scheduler.state.num_swapped_out) == (1, 1, 0)
    assert max(world.computed.values()) == 2


@both
def test_a_sequence_that_is_computed_again_has_committed_its_last_tokens_first(overlap: bool) -> None:
    world = tiered(preemption=Preemption.RECOMPUTE, overlap=overlap)
    old = world.submit(make_request([1, 2, 0, 1], 9))
    young = world.submit(make_request([2, 2, 1], 9))
    until(world, young, SequenceState.LEAVING)
    num_computed = young.sequences[0].num_computed
    until(world, young, SequenceState.RUNNING)
    world.run()
    world.check_outputs()
    again = sum(count - 1 for (arrival, _, _), count in world.computed.items() if arrival == 1)
    assert again == num_computed % 2, "no more than its partial block"
    assert old.num_preemptions == 0


@both
@pytest.mark.parametrize("state", AWAY)
def test_a_sequence_that_ends_while_it_is_away_leaves_nothing_behind(state: SequenceState, overlap: bool) -> None:
    world = tiered(overlap=overlap)
    _, young = two(world)
    until(world, young, state)
    world.cancel(young)
    num_had = young.num_new_tokens
    late = world.submit(make_request([2, 2, 1], 4))
    world.run()
    world.check_outputs()
    assert late.num_new_tokens == 4
    assert young.num_new_tokens == num_had
    assert world.cache.manager.queries.stats().num_held_host_blocks == 0


@both
@pytest.mark.parametrize("after", range(1, 16))
def test_an_end_that_is_noted_between_plan_and_answer(after: int, overlap: bool) -> None:
    world = tiered(overlap=overlap)
    _, young = two(world)
    world.cancel(young, after=after)
    world.run()
    world.check_outputs()
    assert world.cache.manager.queries.stats().num_held_host_blocks == 0


@both
@pytest.mark.parametrize("state", AWAY)
def test_a_lost_session_computes_again_what_was_away(state: SequenceState, overlap: bool) -> None:
    world = tiered(overlap=overlap)
    _, young = two(world)
    until(world, young, state)
    world.drop_flight()
    assert world.scheduler.reset(world.limits) == []
    assert young.sequences[0].sequence_id is None
    world.cache.__init__(8, 2, 64, num_host_blocks=40)  # type: ignore[misc]
    world.memory.clear()
    world.host.clear()
    world.run()
    world.check_outputs()


@both
@pytest.mark.parametrize("kind", [1, 2])
def test_a_transfer_that_fails_ends_in_computing_again(kind: int, overlap: bool) -> None:
    world = tiered(overlap=overlap)
    world.fails = lambda order_id, of: of == kind
    _, young = two(world)
    world.run()
    world.check_outputs()
    assert world.num_failed > 0
    assert young.num_preemptions >= 1
    assert max(world.computed.values()) > 1


def test_an_id_is_never_used_twice() -> None:
    world = tiered(num_blocks=6)
    ids: list[int] = []
    create: Callable[..., int] = world.cache.create

    def note(sequence_id: int, *args: object) -> int:
        ids.append(sequence_id)
        return create(sequence_id, *args)

    world.cache.create = note
    requests = [world.submit(make_request([place % 3, place // 3], 6, look_up=False)) for place in range(6)]
    while not (swapped := [request for request in requests if request.sequences[0].state is SequenceState.SWAPPED]):
        world.step()
    kept = swapped[0].sequences[0].sequence_id
    world.cancel(swapped[0])
    world.run()
    world.check_outputs()
    assert world.scheduler.state.num_swapped_out > 1
    assert ids.count(kept) == 1
    assert len(set(ids)) == len(ids)


def test_a_refused_swap_in_keeps_its_place() -> None:
    world = tiered()
    old, young = two(world)
    until(world, young, SequenceState.SWAPPED)
    world.cancel(old)
    step, asked = world.cache.step, []

    def refuse(plan: Plan) -> StepReply:
        asked.append((plan.swapped_in, plan.started))
        nothing = plan._replace(swap_in_ids=plan.swap_in_ids[:0])
        return step(nothing)._replace(swap_in_results=np.full(len(plan.swap_in_ids), 2, np.int32))  # type: ignore[no-any-return]

    world.cache.step = refuse
    world.step()
    small = [world.submit(make_request([0, place], 2)) for place in range(3)]
    for _ in range(3):
        world.step()
    assert asked == [((young.sequences[0],), ())] * 4, "none behind it tries"
    world.cache.step = step
    world.run()
    world.check_outputs()
    assert young.num_preemptions == 1
    assert max(world.computed.values()) == 1
    assert [request.num_new_tokens for request in small] == [2] * 3


@both
def test_a_critical_one_gives_way_only_where_nothing_goes_on_otherwise(overlap: bool) -> None:
    world = tiered(overlap=overlap)
    critical = world.submit(make_request([2, 2, 1], 9, priority=1000))
    low = world.submit(make_request([1, 2, 0, 1], 9, priority=-1))
    world.run()
    assert (critical.num_preemptions, low.num_preemptions) == (0, 1)
    pair = [world.submit(make_request([2, place, 1], 9, priority=1000, look_up=False)) for place in range(2)]
    while not pair[1].num_preemptions:
        work = world.step()
    assert not len(work.rows), "the earlier arrival would have gone on"
    world.run()
    world.check_outputs()
    assert [request.num_preemptions for request in pair] == [0, 1]
