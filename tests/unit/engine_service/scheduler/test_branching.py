"""Beam searches as forks: with any room, their lists are those of a search in one place, and everything is given back."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.outputs.beam_search import BeamOptions
from kvkeeper.engine_service.scheduler.waiting import NEW_TOKEN_WEIGHT, FairShare, WaitingSequences
from kvkeeper.engine_service.values.request import RequestState, SequenceState
from tests.support.slices import scaled
from tests.support.worlds.beam_world import BeamWorld
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import make_request
from tests.support.worlds.tiny_columns import TinyColumns

PROMPT = [1, 2, 0, 1, 2]


def check(world: BeamWorld, most_steps: int = 2000) -> None:
    world.run(most_steps)
    world.check_searches()
    world.requests = [request for request in world.requests if request not in world.searches]
    world.check_outputs()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_lists_are_those_of_a_search_in_one_place(num_beams: int, block_size: int, overlap: bool) -> None:
    world = BeamWorld(num_blocks=300, block_size=block_size, make_cache=CoreCache, overlap=overlap)
    requests = [world.submit_search(PROMPT[:length], 9, BeamOptions(num_beams), num_beams) for length in (1, 3, 4, 5)]
    world.submit(make_request(PROMPT, 9, n=2))
    check(world)
    assert world.scheduler.state.num_preemptions == 0
    if num_beams > 1 and block_size > 1:
        assert all(request.num_copied_blocks > 0 for request in requests), "lists part within a block"
    if block_size == 1:
        assert all(request.num_copied_blocks == 0 for request in requests)


def test_a_list_computes_each_token_once() -> None:
    world = BeamWorld(block_size=4, make_cache=CoreCache)
    world.submit_search(PROMPT, 9, BeamOptions(4, early_stopping=True), 2)
    check(world)
    prompt = [key for key in world.computed if key[2] < len(PROMPT)]
    assert all(world.computed[key] == 1 for key in prompt)
    assert {key[1] for key in prompt} == {0}, "forks share the prompt"
    assert sum(world.computed.values()) == len(PROMPT) + world.num_candidates_taken - 1


@pytest.mark.parametrize("overlap", [False, True])
def test_the_lists_of_a_search_compute_in_one_step(overlap: bool) -> None:
    """Also where the next step is planned before it is known how they part; other sequences are in every step."""
    world = BeamWorld(make_cache=CoreCache, overlap=overlap)
    request = world.submit_search(PROMPT, 12, BeamOptions(3), 3)
    other = world.submit(make_request(PROMPT[1:], 12))
    world.step()
    for number in range(1, 9):
        lists = set(request.sequences)
        work = world.step()
        assert other.sequences[0] in work.sampled
        if overlap and number % 2:
            assert not work.searched
        else:
            assert set(work.searched) == lists
            assert len(lists) == 3
    check(world)


@pytest.mark.parametrize("make_cache", [TinyColumns, CoreCache])
@pytest.mark.parametrize("num_spare", [0, 1, 3])
def test_in_a_pool_for_one_list_they_take_turns(num_spare: int, make_cache: type[TinyColumns] | type[CoreCache]) -> None:
    world = BeamWorld(num_blocks=1 + 6 + num_spare, block_size=2, make_cache=make_cache)
    request = world.submit_search(PROMPT, 7, BeamOptions(4), 4)
    check(world)
    assert request.num_preemptions > 0


@pytest.mark.usefixtures("each_cache")
def test_the_last_list_that_computes_is_not_the_one_to_give_way() -> None:
    """Or it would start again and again, for want of blocks that a list holds which waits for it."""
    world = BeamWorld(num_blocks=4, block_size=3, max_sequences=4, token_budget=3, chunk_size=1, max_running=3)
    world.submit_search([0, 0], 3, BeamOptions(3, 0.0), 3)
    check(world)


def test_its_tenant_s_share_is_charged_for_every_list() -> None:
    shares = FairShare()
    world = BeamWorld(waiting=WaitingSequences(shares=shares), make_cache=CoreCache)
    request = world.submit_search(PROMPT, 4, BeamOptions(3), 3)
    num_going = 0
    while world.busy:
        before = request.sequences
        world.step()
        num_going += 0 if request.sequences is before else len(request.sequences)
    world.check_searches()
    assert shares.served(request.tenant) == len(PROMPT) + NEW_TOKEN_WEIGHT * num_going


def test_two_searches_in_rows_for_one_do_not_wait_for_each_other() -> None:
    world = BeamWorld(max_running=4, make_cache=CoreCache)
    first = world.submit_search(PROMPT, 6, BeamOptions(4), 4)
    second = world.submit_search(PROMPT[1:], 6, BeamOptions(3), 3)
    plain = world.submit(make_request(PROMPT, 4))
    world.step()
    assert first.state is RequestState.RUNNING
    assert {second.state, plain.state} == {RequestState.PENDING}, "the rows of the first are promised, and none overtakes"
    check(world)
    assert world.scheduler.state.num_preemptions == 0


@pytest.mark.parametrize("max_sequences", [3, 4, 5, 6])
def test_slots_for_little_more_than_one_search(max_sequences: int) -> None:
    world = BeamWorld(max_sequences=max_sequences, max_running=6, make_cache=CoreCache)
    for place in range(3):
        world.submit(make_request([place], 5))
    for length in (2, 3, 5):
        world.submit_search(PROMPT[:length], 6, BeamOptions(3), 3)
        world.submit(make_request(PROMPT[:length], 4, n=2))
    check(world)


@pytest.mark.parametrize("num_refused", [1, 2, 5])
def test_a_list_with_a_refused_fork_starts_by_itself(num_refused: int) -> None:
    world = BeamWorld(block_size=4, make_cache=TinyColumns)
    world.cache.num_refused_forks_to_come = num_refused
    request = world.submit_search(PROMPT, 6, BeamOptions(3), 3)
    check(world)
    assert request.num_preemptions == 0


def test_a_list_that_gave_way_while_it_waited_is_not_computed_again() -> None:
    """One list is held back, the others rest; one of these gives its blocks back, and its continuations start by themselves."""
    world = BeamWorld(num_blocks=40, block_size=2, make_cache=TinyColumns)
    request = world.submit_search(PROMPT, 8, BeamOptions(3), 3)
    while len(request.sequences) < 3:
        world.step()
    world.step()
    world.cache.num_refused_forks_to_come = 1
    while all(sequence.state is not SequenceState.NEW for sequence in request.sequences):
        world.step()
    resting = world.scheduler.state.resting()
    assert resting
    num_taken = world.num_candidates_taken
    world.scheduler.preemptor.preempt(resting[-1])
    assert resting[-1].state is SequenceState.ENDED
    while world.num_candidates_taken == num_taken:
        world.step()
    assert world.num_candidates_taken == num_taken + 1, "only the one that was held back"
    check(world)


@pytest.mark.usefixtures("each_cache")
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_lost_session_in_the_middle_of_a_search(num_steps: int) -> None:
    world = BeamWorld(num_blocks=20, block_size=2)
    world.submit_search(PROMPT, 8, BeamOptions(3), 3)
    world.submit_search(PROMPT[:4], 8, BeamOptions(4), 2)
    for _ in range(num_steps):
        world.step()
    assert world.scheduler.reset(world.limits) == []
    world.cache.__init__(20, 2, 64)  # type: ignore[misc]
    world.memory.clear()
    check(world)


def test_a_list_that_rested_when_its_session_was_lost_has_ended() -> None:
    """What the model said of it is known: it neither waits nor is computed again, and its search ends as it would have."""
    world = BeamWorld(num_blocks=40, block_size=2, make_cache=TinyColumns)
    request = world.submit_search(PROMPT, 8, BeamOptions(3), 3)
    while len(request.sequences) < 3:
        world.step()
    world.step()
    world.cache.num_refused_forks_to_come = 1
    while not world.scheduler.state.resting() or all(q.state is not SequenceState.NEW for q in request.sequences):
        world.step()
    resting, lists = world.scheduler.state.resting(), request.sequences
    num_taken = world.num_candidates_taken
    assert world.scheduler.reset(world.limits) == []
    world.cache.__init__(40, 2, 64)  # type: ignore[misc]
    world.memory.clear()
    assert {sequence.state for sequence in resting} == {SequenceState.ENDED}
    assert world.scheduler.num_waiting == len(lists) - len(resting) > 0
    while request.sequences is lists:
        world.step()
    assert world.num_candidates_taken == num_taken + len(lists) - len(resting), "no list's candidates were asked for twice"
    check(world)


@pytest.mark.usefixtures("each_cache")
def test_after_a_lost_session_what_can_never_fit_is_told() -> None:
    world = BeamWorld()
    request = world.submit_search(PROMPT, 8, BeamOptions(4))
    small = type(world.limits)(2, 100, 64, max_running=3)
    assert world.scheduler.reset(small) == [request]


@pytest.mark.parametrize("num_steps", range(7))
def test_a_cancelled_search_gives_everything_back(num_steps: int) -> None:
    world = BeamWorld(block_size=4, overlap=True, make_cache=CoreCache)
    request = world.submit_search(PROMPT, 9, BeamOptions(4), 2)
    world.cancel(request, after=num_steps)
    world.submit(make_request(PROMPT, 9))
    check(world)


@settings(max_examples=scaled(400), deadline=None, phases=[Phase.generate])
@given(
    searches=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=7),
            st.integers(1, 6),  # new tokens
            st.integers(1, 3),  # beams
            st.sampled_from([0.0, 1.0, -0.5, 2.0]),  # length penalty
            st.booleans(),  # early stopping
            st.integers(-1, 1),  # priority
            st.integers(0, 4),  # steps before it
            st.sampled_from([None, None, None, 0, 2, 5]),  # cancelled after so many steps
        ),
        min_size=1,
        max_size=4,
    ),
    num_plain=st.integers(0, 4),
    block_size=st.sampled_from([1, 2, 3, 4]),
    spare_blocks=st.integers(0, 14),
    chunk_size=st.sampled_from([1, 2, 64]),
    token_budget=st.sampled_from([3, 4, 9, 64]),
    max_running=st.sampled_from([3, 4, 6, 32]),
    max_sequences=st.sampled_from([3, 4, 6, 64]),
    refused_forks=st.integers(0, 3),
    clears=st.sampled_from([None, None, 1, 2, 3, 7]),  # the cache is, before every so many steps
    kind=st.sampled_from([(TinyColumns, False), (CoreCache, False), (CoreCache, True)]),
)
def test_any_searches_in_any_pool_give_what_a_search_in_one_place_gives(
    searches: list[tuple[list[int], int, int, float, bool, int, int, int | None]],
    num_plain: int,
    block_size: int,
    spare_blocks: int,
    chunk_size: int,
    token_budget: int,
    max_running: int,
    max_sequences: int,
    refused_forks: int,
    clears: int | None,
    kind: tuple[type[TinyColumns] | type[CoreCache], bool],
) -> None:
    longest = max(9, *(len(prompt) + max_new for prompt, max_new, *_ in searches))
    num_blocks = 1 + -(-longest // block_size) + spare_blocks
    make_cache, overlap = kind
    world = BeamWorld(num_blocks, block_size, max_sequences, token_budget, chunk_size, max_running, make_cache, overlap=overlap)
    if make_cache is TinyColumns:
        world.cache.num_refused_forks_to_come = refused_forks
    world.clears = lambda: clears is not None and world.num_steps % clears == 0
    for place in range(num_plain):
        world.submit(make_request([place % 3] * (place + 1), 1 + place, n=1 + place % 3))
    for prompt, max_new, num_beams, length_penalty, early_stopping, priority, delay, cancel_after in searches:
        for _ in range(delay):
            world.step()
        options = BeamOptions(num_beams, length_penalty, early_stopping)
        request = world.submit_search(prompt, max_new, options, num_beams, priority)
        if cancel_after is not None:
            world.cancel(request, after=cancel_after)
    check(world, most_steps=3000)
