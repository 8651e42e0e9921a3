"""The scheduler alone, against each cache and a shadow memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.scheduler.policies import POLICY_NAMES, make_ordering
from kvkeeper.engine_service.scheduler.waiting import FairShare, WaitingSequences
from kvkeeper.engine_service.values.request import RequestState, SequenceState
from tests.support.slices import scaled
from tests.support.worlds.scheduler_world import World, expected_output, make_request
from tests.support.worlds.tiny_columns import TinyColumns

pytestmark = pytest.mark.usefixtures("each_cache")


def test_one_request_is_prefilled_in_chunks_and_decoded() -> None:
    world = World(chunk_size=4, token_budget=8)
    request = world.submit(make_request([1, 2, 0, 1, 2, 0, 1, 1, 2], 5))
    assert request.state is RequestState.PENDING
    assert [world.step().num_new.tolist() for _ in range(4)] == [[4], [4], [1], [1]]
    assert request.state is RequestState.RUNNING
    world.run()
    world.check_outputs()
    assert max(world.computed.values()) == 1
    assert len(world.computed) == 9 + 5 - 1  # the last token needs no KV


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_every_prompt_token_is_computed_once_for_every_chunk_size(length: int, chunk: int) -> None:
    world = World(chunk_size=chunk)
    world.submit(make_request([token % 3 for token in range(length)], 3))
    world.run()
    world.check_outputs()
    assert set(world.computed.values()) == {1}


def test_decodes_and_prompts_share_a_batch_within_the_budget() -> None:
    world = World(token_budget=6, chunk_size=4)
    world.submit(make_request([1, 2], 12))
    world.step()
    world.submit(make_request([2] * 10, 2))
    work = world.step()
    assert sorted(work.num_new.tolist()) == [1, 4]
    world.submit(make_request([0] * 7, 2))
    work = world.step()
    assert work.num_new.tolist() == [1, 1, 4], "rows of one token come first"
    world.run()
    world.check_outputs()


def test_prompt_of_an_earlier_request_is_hit_and_leaves_a_token() -> None:
    world = World(block_size=2)
    world.submit(make_request([1, 2, 0, 1], 2))
    world.run()
    again = world.submit(make_request([1, 2, 0, 1], 2))
    cold = world.submit(make_request([1, 2, 0, 1], 2, look_up=False))
    world.run()
    world.check_outputs()
    assert again.num_hit_tokens == 2
    assert cold.num_hit_tokens == 0


def test_continuations_share_one_prompt_and_part_by_copies() -> None:
    world = World(block_size=4)
    request = world.submit(make_request([1, 2, 0, 1, 2], 6, n=3))
    world.run()
    world.check_outputs()
    assert len({tuple(expected_output(request, index)) for index in range(3)}) == 3
    prompt = [key for key in world.computed if key[2] < 5]
    assert prompt == [(0, 0, position) for position in range(5)]
    assert max(world.computed.values()) == 1
    assert request.num_copied_blocks == 2  # three holders of the partial tail


def test_continuations_of_a_whole_block_prompt_copy_nothing() -> None:
    world = World(block_size=4)
    request = world.submit(make_request([1, 2, 0, 1], 6, n=3))
    world.run()
    world.check_outputs()
    assert request.num_copied_blocks == 0


def test_a_child_of_a_refused_fork_starts_by_itself() -> None:
    world = World(block_size=4, make_cache=TinyColumns)
    world.cache.num_refused_forks_to_come = 1
    request = world.submit(make_request([1, 2, 0, 1, 2], 9, n=3))
    world.run()
    world.check_outputs()
    assert max(world.computed.values()) == 1
    assert min(key[2] for key in world.computed if key[1] == 1) == 4, "all but the whole blocks of the prompt"
    assert request.num_copied_blocks == 1
    assert request.num_preemptions == 0


def test_a_fork_computes_its_first_token_in_the_step_that_makes_it() -> None:
    world = World()
    request = world.submit(make_request([1, 2, 0, 1, 2], 6, n=3))
    world.step()
    assert set(world.step().sequences) == set(request.sequences)


def test_continuations_after_the_end_of_their_parent_start_by_themselves() -> None:
    world = World(max_running=1)
    request = world.submit(make_request([1, 2, 0, 1, 2], 4, n=3))
    world.run()
    world.check_outputs()
    assert request.num_preemptions == 0


def test_one_token_ends_without_a_fork() -> None:
    world = World()
    world.submit(make_request([1, 2, 0], 1, n=4))
    world.run()
    world.check_outputs()
    assert len(world.computed) == 3


def test_the_lowest_priority_gives_way_first() -> None:
    world = World(num_blocks=8, block_size=2)
    low = world.submit(make_request([1, 2, 0, 1], 9, priority=-1))
    high = world.submit(make_request([2, 2, 1], 9))
    world.run()
    world.check_outputs()
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_the_only_running_one_is_never_preempted() -> None:
    world = World(num_blocks=5, block_size=2)
    world.hold_blocks(2)
    request = world.submit(make_request([1, 2, 0], 4))
    for _ in range(10):
        world.step()
    assert request.state is RequestState.RUNNING
    world.release_held_blocks()
    world.run()
    world.check_outputs()
    assert request.num_preemptions == 0


def test_the_only_sequence_gives_way_when_an_earlier_one_of_another_engine_waits_for_blocks() -> None:
    world = World(num_blocks=6, block_size=2)
    request = world.submit(make_request([1, 2, 0], 6))
    for _ in range(2):
        world.step()
    world.cache.num_reclaim_hint = 1
    world.step()
    assert request.state is RequestState.PREEMPTED
    assert request.num_preemptions == 1
    world.cache.num_reclaim_hint = 0
    world.run()
    world.check_outputs()


def test_one_sequence_a_step_gives_way_the_youngest_first() -> None:
    world = World(num_blocks=30, block_size=2)
    requests = [world.submit(make_request([1, place % 3, 0], 9)) for place in range(3)]
    world.step()
    world.cache.num_reclaim_hint = 2
    for num_given in (1, 2):
        world.step()
        assert [request.num_preemptions for request in requests] == [0] * (3 - num_given) + [1] * num_given
    world.cache.num_reclaim_hint = 0
    world.step()
    assert requests[1].state is RequestState.PREEMPTED, "nothing starts until another sequence has ended"
    world.run()
    world.check_outputs()
    assert [request.num_preemptions for request in requests] == [0, 1, 1]


def test_no_request_overtakes_a_refused_start_for_ever() -> None:
    world = World(num_blocks=9, block_size=2)
    runner = world.submit(make_request([1, 2, 0, 1, 2, 1, 0], 6))
    world.step()
    big = world.submit(make_request([2] * 12, 2))
    small = [world.submit(make_request([0, place % 3, place // 3], 2)) for place in range(9)]
    world.run()
    world.check_outputs()
    order = [sequence.request for sequence in world.started if sequence.request is not runner]
    assert order.index(big) <= len(small) // 2


def test_a_cancelled_request_gives_everything_back() -> None:
    world = World(block_size=4)
    running = world.submit(make_request([1, 2, 0, 1, 2], 9, n=3))
    for _ in range(3):
        world.step()
    waiting = world.submit(make_request([1, 1], 3))
    world.create_all()
    new = world.submit(make_request([1, 1], 3))
    for request in (running, waiting, new):
        world.cancel(request)
    world.step()
    assert not world.cache.sequences
    world.run()


def test_a_sequence_that_ended_while_it_was_created_is_released() -> None:
    world = World()
    request = world.submit(make_request([1, 2], 3))
    sequence = world.scheduler.next_to_create()
    assert sequence is not None
    assert sequence.sequence_id is not None
    world.cache.create(sequence.sequence_id, [1, 2], 5)
    world.cancel(request)
    world.scheduler.waiting.created(sequence)
    world.run()


def test_slots_of_the_cache_service_bound_what_is_created() -> None:
    world = World(max_sequences=3)
    for place in range(8):
        world.submit(make_request([place % 3, 1], 4, n=1 + place % 2))
    while world.busy:
        world.step()
        assert len(world.cache.sequences) <= 3
    world.run()
    world.check_outputs()


def test_a_lost_session_restarts_all_from_the_tokens_they_hold() -> None:
    world = World(num_blocks=40, block_size=4)
    world.submit(make_request([1, 2, 0, 1, 2], 9, n=3))
    world.submit(make_request([1, 2, 0, 1, 2, 1], 9))
    for _ in range(4):
        world.step()
    assert world.scheduler.reset(world.limits) == []
    world.cache.__init__(40, 4, 64)  # type: ignore[misc]
    world.memory.clear()
    world.submit(make_request([2, 2], 2))
    world.run()
    world.check_outputs()


def test_discarded_work_is_not_committed() -> None:
    world = World(block_size=2)
    request = world.submit(make_request([1, 2, 0, 1, 2], 3))
    world.step()
    world.scheduler.end_sequence(request.sequences[0], discard=True)
    world.step()
    assert not world.cache.num_cached_blocks
    assert request.sequences[0].state is SequenceState.ENDED


arrivals = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.integers(1, 6),  # new tokens
        st.integers(1, 4),  # continuations
        st.integers(-1, 1),  # priority
        st.integers(0, 4),  # steps before it
        st.sampled_from([None, None, None, 0, 2, 5]),  # cancelled after so many steps
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=scaled(150), deadline=None)  # on each cache
@given(
    arrivals=arrivals,
    block_size=st.sampled_from([1, 2, 3, 4]),
    spare_blocks=st.integers(0, 12),
    chunk_size=st.sampled_from([1, 2, 5, 64]),
    token_budget=st.sampled_from([1, 2, 4, 9, 64]),
    max_running=st.sampled_from([1, 2, 3, 32]),
    max_sequences=st.sampled_from([1, 2, 4, 64]),
    refused_forks=st.integers(0, 3),
    policy=st.tuples(st.sampled_from(POLICY_NAMES), st.sampled_from([None, FairShare])),
    budgets=st.tuples(st.sampled_from([1, 3, 64]), st.sampled_from([1, 2, 64])),
)
def test_any_arrivals_in_any_pool_end_with_the_right_tokens(
    arrivals: list[tuple[list[int], int, int, int, int, int | None]],
    block_size: int,
    spare_blocks: int,
    chunk_size: int,
    token_budget: int,
    max_running: int,
    max_sequences: int,
    refused_forks: int,
    policy: tuple[str, type[FairShare] | None],
    budgets: tuple[int, int],
) -> None:
    longest = max(len(prompt) + max_new for prompt, max_new, *_ in arrivals)
    num_blocks = 1 + -(-longest // block_size) + spare_blocks
    name, make_shares = policy
    waiting = WaitingSequences(make_ordering(name), make_shares() if make_shares else None)
    sizes = (num_blocks, block_size, max_sequences, token_budget, chunk_size, max_running)
    world = World(*sizes, waiting=waiting, prefill_budget=budgets[0], decode_budget=budgets[1])
    if isinstance(world.cache, TinyColumns):
        world.cache.num_refused_forks_to_come = refused_forks
    for prompt, max_new, n, priority, delay, cancel_after in arrivals:
        for _ in range(delay):
            world.step()
        request = make_request(prompt, max_new, n, priority)
        request.tenant = "ab"[len(prompt) % 2]
        world.submit(request)
        if cancel_after is not None:
            world.cancel(request, after=cancel_after)
    world.run(most_steps=3000)
    for request in world.requests:
        for sequence in request.sequences:
            output = world.outputs[sequence]
            expected = expected_output(request, sequence.index)
            assert output == expected[: len(output)]
            assert output == expected or request in world.cancelled
    roomy = min(max_running, token_budget) >= 32 and max_sequences == 64
    if roomy and not refused_forks and not world.scheduler.state.num_preemptions:
        prompt_keys = [key for key in world.computed if key[2] < len(world.requests[key[0]].prompt)]
        assert all(continuation == 0 for _, continuation, _ in prompt_keys), "the prompt belongs to the first"
        assert all(world.computed[key] == 1 for key in prompt_keys)
    if max_running == 1:
        assert not world.scheduler.state.num_preemptions
