"""The mistakes of earlier systems that a cache can make, and the test of each. A row without its test fails here."""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[3]
PAST = "unit/cache_service/test_past_mistakes.py"
COPIES = "test_copy_on_write_copies_the_block_that_is_written_and_no_other"
RULES = "unit/cache_service/core/test_rules.py"
SWAP = "unit/cache_service/core/tiers/test_swap.py"
RETENTION = "unit/cache_service/core/sequences/test_retention.py"

MISTAKES = {
    "swap-out then release frees twice": (SWAP, "test_releasing_a_swapped_sequence_frees_nothing_twice"),
    "swap moves no bytes, or restores zeros": (SWAP, "test_the_bytes_come_back"),
    "swap-in drops the saved data before there is room": (SWAP, "test_saved_data_is_not_dropped_before_there_is_room"),
    "a swapped sequence is still decoded": (SWAP, "test_a_swapped_sequence_is_not_stepped"),
    "a swap map keyed by a reusable id": (PAST, "test_what_was_swapped_under_an_id_is_not_what_its_next_owner_swaps_in"),
    "a double release gives a block two owners": (PAST, "test_a_double_release_frees_nothing_twice"),
    "a second create under the same id leaks the first": (PAST, "test_a_second_create_under_the_same_id_leaks_nothing"),
    "copy-on-write copies nothing": (PAST, COPIES),
    "copy-on-write copies everything": (PAST, COPIES),
    "copy-on-write only when a new block is needed": (PAST, COPIES),
    "a clone's write changes its source": (RULES, "test_r3_a_fork_and_its_parent_spell_their_tokens_after_both_have_written"),
    "releasing a sequence with a live clone leaks": (RULES, "test_r1_a_block_is_free_only_when_the_last_table_lets_go"),
    "id 0 treated as absent": (PAST, "test_id_0_is_refused_and_never_means_absent"),
    "half an allocation left behind after a failure": (PAST, "test_no_half_allocation_is_left_behind_by_a_failure"),
    "reading past the length": ("api/test_kv_io.py", "test_reads_stay_below_the_committed_length"),
    "sharing past the length": (PAST, "test_nothing_past_the_length_can_be_read_or_shared"),
    "reading the previous owner's values": ("api/test_executor_cache.py", "test_copies_run_in_order"),
    "a window that drops tokens it should keep": (
        RETENTION,
        "test_a_block_is_dropped_when_its_last_token_leaves_the_window_and_not_before",
    ),
    "positions that drift over live tokens": (RETENTION, "test_positions_do_not_drift_and_an_append_overwrites_no_live_token"),
    "evicting everything because forks free nothing": (
        PAST,
        "test_evicting_does_not_stop_at_or_run_over_blocks_that_a_fork_shares",
    ),
    "evicting the forks of a sequence, which frees nothing": (
        "unit/cache_service/core/calls/test_victims.py",
        "test_a_fork_that_frees_nothing_is_no_victim_and_two_that_share_all_are_only_together",
    ),
    "evicting the sequence being written": (
        "unit/cache_service/core/calls/test_victims.py",
        "test_what_the_last_step_writes_is_no_victim",
    ),
    "pressure reported critical for an empty pool": (
        "unit/cache_service/core/blocks/test_pressure.py",
        "test_an_empty_pool_is_never_under_pressure",
    ),
    "a gc that can free nothing": ("api/test_room.py", "test_garbage_is_collected_once"),
    "an eviction that reports what it did not free": (PAST, "test_an_eviction_that_can_free_nothing_says_so"),
    "prefix references that never drop": (PAST, "test_references_of_prefix_hits_drop"),
    "pin references that never drop": (
        "unit/cache_service/core/blocks/test_pins.py",
        "test_references_drop_however_a_pin_ends",
    ),
    "a hit rate with no misses in it": (PAST, "test_the_hit_rate_knows_misses"),
    "a request that can never fit blocks others": (PAST, "test_a_request_that_can_never_fit_does_not_block_others"),
    "admission mixes up free blocks and head-room": (
        PAST,
        "test_an_admission_answer_does_not_mix_up_free_blocks_and_head_room",
    ),
    "surplus blocks kept after trimming": (PAST, "test_no_surplus_blocks_are_kept_after_trimming"),
    "reads that do not count as access": (PAST, "test_naming_a_sequence_counts_as_access"),
    "evicting the sequence being extended": (PAST, "test_the_sequence_being_extended_is_not_evicted_for_itself"),
    "negative durations of a lease": (PAST, "test_a_clock_that_stands_still_or_jumps_back_reaps_no_session"),
    "negative durations of a time to live": (
        "unit/cache_service/core/blocks/test_cache_limits.py",
        "test_a_clock_that_goes_back_makes_nothing_older",
    ),
    "look-up and hold in two steps": ("soak/test_rows.py", "test_row"),
    "locks taken in opposite orders": ("unit/cache_service/core/test_pure.py", "test_the_core_takes_no_locks"),
    "element sizes and layer counts wrong in byte figures": (PAST, "test_a_block_weighs_k_and_v_of_all_layers"),
}


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_has_a_test(mistake: str) -> None:
    file, name = MISTAKES[mistake]
    assert name in functions_of(file)
