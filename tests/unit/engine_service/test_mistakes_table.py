"""The mistakes of earlier systems that an engine can make, and the test of each. A row without its test fails here."""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SCHEDULER = "unit/engine_service/scheduler/test_scheduler.py"
PAST = "unit/engine_service/test_past_mistakes.py"
PAST_E2E = "e2e/test_past_mistakes.py"
REQUESTS = "e2e/test_requests.py"

MISTAKES = {
    "only the first chunk of a prompt computed": (SCHEDULER, "test_every_prompt_token_is_computed_once_for_every_chunk_size"),
    "equal-priority requests preempting each other": (
        "unit/engine_service/scheduler/test_policies.py",
        "test_equals_do_not_take_turns_and_a_preempted_request_keeps_its_place",
    ),
    "a request that can never fit blocking the queue": (REQUESTS, "test_what_can_never_fit_is_refused_with_the_limit"),
    "a request that fits no longer blocking the queue": (
        "e2e/test_sessions.py",
        "test_a_pool_that_came_back_smaller_ends_what_can_not_fit_it",
    ),
    "cancelling that leaves the request running": (REQUESTS, "test_cancel_ends_the_stream_and_gives_the_blocks_back"),
    "a client that went away leaves its request running": (REQUESTS, "test_a_client_that_goes_away_cancels"),
    "end-of-sequence ignored": ("e2e/test_text.py", "test_the_end_of_sequence_is_not_part_of_the_output"),
    "a decode position off by one": (SCHEDULER, "test_one_request_is_prefilled_in_chunks_and_decoded"),
    "the last prompt token fed twice": (SCHEDULER, "test_every_prompt_token_is_computed_once_for_every_chunk_size"),
    "swapped requests still decoded": (
        "unit/engine_service/scheduler/test_swap.py",
        "test_what_is_swapped_out_is_not_computed",
    ),
    "a failed admission sent to the back of the queue": (
        "unit/engine_service/scheduler/test_policies.py",
        "test_a_refused_start_keeps_its_place_before_all_that_come",
    ),
    "surplus blocks kept after trimming": (PAST, "test_no_sequence_holds_more_blocks_than_its_tokens_need"),
    "evicting the sequence being extended": (
        PAST,
        "test_a_preempted_sequence_computes_nothing_from_then_on",
    ),
    "submit's check and enqueue in two steps": (PAST_E2E, "test_of_many_that_come_at_once_as_many_are_taken_as_may_wait"),
    "an id's check and its taking in two steps": (PAST_E2E, "test_of_twins_that_come_at_once_one_is_taken"),
    "negative durations": (PAST, "test_durations_are_of_clocks_that_never_go_back"),
    "locks taken in opposite orders": (PAST, "test_the_engine_takes_no_locks"),
    "metrics that are placeholders": (PAST_E2E, "test_no_number_is_a_placeholder"),
    "a hit rate with no misses in it": (PAST_E2E, "test_the_share_of_what_was_cached_knows_what_was_not"),
    "tests that run copies of the code": (PAST, "test_tests_run_the_product_and_no_copy_of_it"),
    "tests that pass with no model behind them": ("e2e/test_hash_toy.py", "test_chunks_of_any_size_give_the_same"),
}


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_has_a_test(mistake: str) -> None:
    file, name = MISTAKES[mistake]
    assert name in functions_of(file)
