"""Budgets of a step: tokens, prompt tokens, and sequences that decode."""

import numpy as np
import pytest

from kvkeeper.engine_service.rpc.admission import get_connection
from kvkeeper.engine_service.scheduler.headroom import Moved
from kvkeeper.engine_service.scheduler.waiting import FairShare, WaitingSequences
from tests.support.worlds.scheduler_world import World, make_request

pytestmark = pytest.mark.usefixtures("each_cache")


@pytest.mark.parametrize("prefill_budget", [1, 3, 7, 8])
def test_prompts_together_stay_within_their_budget_and_every_token_is_computed_once(prefill_budget: int) -> None:
    world = World(chunk_size=4, token_budget=16, prefill_budget=prefill_budget)
    for length in (9, 3, 4, 5, 1):
        world.submit(make_request([place % 3 for place in range(length)], 3, look_up=False))
    most = 0
    while world.busy:
        most = max(most, world.step().num_prompt_tokens)
    assert most == prefill_budget
    world.run()
    world.check_outputs()
    assert set(world.computed.values()) == {1}


def test_decodes_go_on_beside_prompts_that_fill_their_budget() -> None:
    world = World(chunk_size=4, token_budget=8, prefill_budget=4)
    world.submit(make_request([1, 2], 12))
    world.step()
    world.submit(make_request([2] * 12, 2))
    assert [world.step().num_new.tolist() for _ in range(3)] == [[1, 4]] * 3


@pytest.mark.parametrize("decode_budget", [1, 2, 3])
def test_more_sequences_than_may_decode_take_turns(decode_budget: int) -> None:
    world = World(decode_budget=decode_budget)
    requests = [world.submit(make_request([place % 3, place], 12, look_up=False)) for place in range(4)]
    world.step()
    while world.busy:
        work = world.step()
        assert len(work.rows) <= decode_budget
        counts = [request.num_new_tokens for request in requests]
        assert max(counts) - min(counts) <= 1
    world.run()
    world.check_outputs()


def test_what_is_forked_takes_turns_too() -> None:
    world = World(decode_budget=2, block_size=4)
    world.submit(make_request([1, 2, 0, 1, 2], 6, n=3))
    world.submit(make_request([2, 2], 6))
    world.run()
    world.check_outputs()
    assert np.max(list(world.computed.values())) == 1


def note_costs(world: World, fixed: int) -> None:
    """Steps cost as much as so many sequences, and as much again for each sequence."""
    for num_tokens in (1, 5, 9, 20):
        world.scheduler.state.decode_costs.note(num_tokens, 0.001 * (fixed + num_tokens))


def test_a_client_with_one_sequence_decodes_in_each_step_beside_few_of_another_that_take_turns() -> None:
    world = World(client_shares=True, chunk_size=4)
    note_costs(world, 3)
    few = world.submit(make_request([1, 2], 16, client="few", look_up=False))
    many = [world.submit(make_request([2, place % 3, place], 8, client="many", look_up=False)) for place in range(10)]
    while any(not request.num_new_tokens for request in (few, *many)):
        world.step()
    while few.num_new_tokens < 16 and world.busy:
        before = few.num_new_tokens
        work = world.step()
        assert few.num_new_tokens == before + 1
        assert len(work.rows) <= 1 + 4, "as long as two steps of one sequence: 2 x (3 + 1) = 3 + 5"
        counts = [request.num_new_tokens for request in many]
        assert max(counts) - min(counts) <= 2
    world.run()
    world.check_outputs()


@pytest.mark.parametrize(("shares", "clients"), [(False, "ab"), (True, "aa")], ids=["switched off", "one client"])
def test_all_decode_where_there_is_nothing_to_share(shares: bool, clients: str) -> None:
    world = World(client_shares=shares)
    note_costs(world, 0)
    for place in range(6):
        world.submit(make_request([1, place % 3, place], 8, client=clients[place > 0], look_up=False))
    for _ in range(3):
        world.step()
    assert len(world.step().rows) == 6
    world.run()
    world.check_outputs()


def test_rows_of_clients_that_have_ended_are_forgotten() -> None:
    world = World(client_shares=True)
    for place in range(40):
        world.submit(make_request([1, place % 3, place], 2, client=str(place), look_up=False))
    world.run()
    assert world.scheduler.running.num_clients == 0


def test_prompts_of_a_client_leave_another_clients_decodes_half_of_the_time_and_all_end() -> None:
    world = World(client_shares=True, chunk_size=8, num_blocks=512, max_running=32)
    state = world.scheduler.state
    for _ in range(4):
        state.decode_costs.note(1, 0.010)
    few = world.submit(make_request([1, 2], 60, client="few", look_up=False))
    while not few.num_new_tokens:
        world.step()
    many = [world.submit(make_request([2] * 15 + [place], 2, client="many", look_up=False)) for place in range(30)]
    with_prompts = 0
    while few.num_new_tokens < 60:
        before = few.num_new_tokens
        work = world.step()
        has_prompts = bool((work.num_new > 1).any())
        world.scheduler.note_step(work, 0.040 if has_prompts else 0.010, Moved())
        with_prompts += has_prompts
        assert few.num_new_tokens == before + 1, "its decodes wait for no prompt"
        assert int((work.num_new > 1).sum()) <= 1
    assert 15 <= with_prompts <= 22, "30 ms of prompts, and three steps of 10 ms that pay for them"
    assert sum(request.num_new_tokens > 0 for request in many) >= 5, "each prompt takes two of these steps"
    world.run()
    world.check_outputs()
    assert all(request.num_new_tokens == 2 for request in many)


def test_a_waiting_client_starts_beside_a_crowd_of_another() -> None:
    world = World(client_shares=True, waiting=WaitingSequences(shares=FairShare(get_connection)), max_running=4)
    crowd = [world.submit(make_request([2, place % 3, place], 4, client="many", look_up=False)) for place in range(40)]
    for _ in range(8):
        world.step()
    other = world.submit(make_request([1, 2, 0], 4, client="few", look_up=False))
    while not other.num_new_tokens:
        world.step()
    assert sum(request.num_new_tokens == 0 for request in crowd) > 20
    world.run()
    world.check_outputs()
