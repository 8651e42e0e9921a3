"""Sequences with states: what a step starts from, where a fork, a preemption and a hit find it, and what late ends leave."""

import dataclasses
import random

import pytest

from kvkeeper.engine_service.scheduler.headroom import Preemption
from tests.support.worlds.scheduler_world import make_request
from tests.support.worlds.state_world import StateWorld

PROMPT = [1, 2, 0, 1, 2, 0, 1, 0, 2, 2, 1]
modes = pytest.mark.parametrize("mode", [{}, {"overlap": True}, {"ahead": True}], ids=["in-turn", "overlap", "ahead"])


@modes
@pytest.mark.parametrize("length", [3, 4, 8, 11])
def test_continuations_share_the_state_of_their_prompt(length: int, mode: dict[str, bool]) -> None:
    """They are forked before it goes on, so no token is computed twice."""
    world = StateWorld(chunk_size=4, **mode)
    request = world.submit(make_request(PROMPT[:length], 6, n=3))
    world.run()
    world.check_outputs()
    assert max(world.computed.values()) == 1
    assert (request.num_copied_blocks > 0) == bool(length % 2), "a state inside a block is copied before it changes"
    assert world.num_states_read > 10


@modes
def test_continuations_without_a_row_start_where_a_state_is_kept(mode: dict[str, bool]) -> None:
    world = StateWorld(chunk_size=4, max_running=2, **mode)
    world.submit(make_request(PROMPT, 6, n=4))
    world.run()
    world.check_outputs()
    again = [position for (_, index, position), times in world.computed.items() if index and position < len(PROMPT)]
    assert again, "some of the prompt was computed again"
    assert min(again) == 8, "behind the last checkpoint"


@modes
def test_a_hit_ends_at_a_checkpoint(mode: dict[str, bool]) -> None:
    world = StateWorld(chunk_size=8, **mode)
    first = world.submit(make_request(PROMPT, 3))
    while world.busy:
        world.step()
    second = world.submit(make_request(PROMPT, 3))
    third = world.submit(make_request(PROMPT[:7], 3))
    world.run()
    world.check_outputs()
    assert (first.num_hit_tokens, second.num_hit_tokens, third.num_hit_tokens) == (0, 8, 4)


def test_what_was_granted_is_computed_in_one_step() -> None:
    """As after a load, where a start was granted more than the step behind it has a share for."""
    world = StateWorld(chunk_size=4)
    request = world.submit(make_request(PROMPT, 3))
    world.step()
    row, state = request.sequences[0].row, world.scheduler.state
    assert state.running.num_computed[row] == 4
    state.limits = dataclasses.replace(state.limits, chunk_size=2)
    assert world.scheduler.planner.plan(world.now).reserve_max.tolist() == [6]
    state.running.num_reserved[row] = 9
    assert world.scheduler.planner.plan(world.now).reserve_max.tolist() == [9]


@modes
@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_a_preempted_sequence_goes_on_from_a_state_that_is_its_own(preemption: Preemption, mode: dict[str, bool]) -> None:
    world = StateWorld(num_blocks=20, num_host_blocks=60, preemption=preemption, chunk_size=6, **mode)
    requests = [world.submit(make_request(PROMPT[at:], 9)) for at in range(6)]
    world.run()
    world.check_outputs()
    assert sum(request.num_preemptions for request in requests) > 0
    if preemption is Preemption.RECOMPUTE:
        assert max(world.computed.values()) > 1


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_reads_the_states_that_it_wrote(seed: int) -> None:
    draw = random.Random(seed)
    world = StateWorld(
        checkpoint_blocks=draw.choice((1, 2, 3)),
        block_size=draw.choice((1, 2, 3)),
        num_blocks=draw.choice((30, 40, 90)),
        num_host_blocks=draw.choice((0, 60)),
        chunk_size=draw.choice((1, 4, 9)),
        max_running=draw.choice((2, 5, 20)),
        ahead=True,
    )
    for _ in range(12):
        prompt = PROMPT[: draw.randrange(1, len(PROMPT))]
        most = min(world.limits.max_len - len(prompt), 12)
        if most < 1:
            continue
        request = world.submit(make_request(prompt, draw.randrange(1, most + 1), n=draw.choice((1, 1, 3))))
        if draw.random() < 0.2:
            world.cancel(request, after=draw.randrange(6))
        for sequence in request.sequences:
            if draw.random() < 0.3:
                world.stop_after[sequence] = draw.randrange(1, 6)
        for _ in range(draw.randrange(4)):
            world.step()
    world.run()
    world.check_outputs()
    assert world.num_checkpoints > 0
