"""Whether a preempted sequence is computed again or swapped: the costs by hand, and what was measured of them."""

import pytest

from kvkeeper.engine_service.scheduler.headroom import (
    Costs,
    Moved,
    Preemption,
    Rate,
    Victim,
    recompute_seconds,
    swap_seconds,
)

BLOCK_BYTES = 1 << 16
AUTO, RECOMPUTE, SWAP = Preemption


def victim(num_computed: int = 1000, num_shareable: int = 992, num_blocks: int = 63) -> Victim:
    return Victim(num_computed, num_shareable, num_blocks)


def costs(tokens_per_second: float, bytes_per_second: float, hit_share: float) -> Costs:
    measured = Costs()
    measured.compute.note(tokens_per_second, 1)
    measured.moves.note(bytes_per_second, 1)
    measured.hit_share = hit_share
    return measured


def test_what_is_still_cached_is_not_computed_again() -> None:
    assert recompute_seconds(victim(), tokens_per_second=1000, hit_share=0) == 1.0
    assert recompute_seconds(victim(), tokens_per_second=1000, hit_share=1) == pytest.approx(0.008)
    assert recompute_seconds(victim(num_shareable=0), tokens_per_second=1000, hit_share=1) == 1.0


def test_a_swap_moves_every_block_twice() -> None:
    assert swap_seconds(victim(), BLOCK_BYTES, bytes_per_second=63 * BLOCK_BYTES, step_seconds=0) == 2.0


def test_a_row_waits_for_its_part_of_some_steps() -> None:
    alone, one_of_four = (Victim(1000, 992, 63, num_running) for num_running in (1, 4))
    assert swap_seconds(alone, BLOCK_BYTES, 63 * BLOCK_BYTES, step_seconds=0.5) == 4.0
    assert swap_seconds(one_of_four, BLOCK_BYTES, 63 * BLOCK_BYTES, step_seconds=0.5) == 2.5
    measured = costs(1e4, 1e9, 0.0)
    assert measured.prefers_swap(alone, AUTO, 100, BLOCK_BYTES)
    measured.note_step(num_rows=1, num_tokens=1, seconds=0.1, moved=Moved())
    assert not measured.prefers_swap(alone, AUTO, 100, BLOCK_BYTES)
    assert measured.prefers_swap(Victim(1000, 992, 63, 32), AUTO, 100, BLOCK_BYTES)


@pytest.mark.parametrize(
    ("hit_share", "tokens_per_second", "swaps"),
    [(0.0, 1e4, True), (1.0, 1e4, False), (0.0, 1e6, False), (0.9, 1e4, True)],
)
def test_auto_takes_what_costs_less(hit_share: float, tokens_per_second: float, swaps: bool) -> None:
    measured = costs(tokens_per_second, 1e9, hit_share)  # a swap: 8.3 ms
    assert measured.prefers_swap(victim(), AUTO, 100, BLOCK_BYTES) is swaps
    assert measured.prefers_swap(victim(), SWAP, 100, BLOCK_BYTES)
    assert not measured.prefers_swap(victim(), RECOMPUTE, 100, BLOCK_BYTES)


@pytest.mark.parametrize("num_host_blocks", [0, 63])
def test_what_the_host_tier_could_never_hold_is_not_swapped(num_host_blocks: int) -> None:
    assert not costs(1, 1e12, 0).prefers_swap(victim(), SWAP, num_host_blocks, BLOCK_BYTES)
    assert costs(1, 1e12, 0).prefers_swap(victim(), SWAP, 64, BLOCK_BYTES)


def test_nothing_computed_is_nothing_to_keep() -> None:
    assert not costs(1, 1e12, 0).prefers_swap(Victim(0, 0, 4), SWAP, 100, BLOCK_BYTES)


def test_the_first_swap_is_one_to_measure() -> None:
    measured = Costs()
    assert not measured.prefers_swap(victim(), AUTO, 100, BLOCK_BYTES), "nothing was ever computed"
    measured.compute.note(1e9, 1)
    assert measured.prefers_swap(victim(), AUTO, 100, BLOCK_BYTES)
    measured.moves.note(1, 1)
    assert not measured.prefers_swap(victim(), AUTO, 100, BLOCK_BYTES)


def test_a_rate_follows_what_changes_and_weighs_what_took_long() -> None:
    rate = Rate()
    assert rate.per_second == 0
    rate.note(100, 1)
    assert rate.per_second == 100
    rate.note(0, 1)
    assert 40 < rate.per_second < 60
    for _ in range(100):
        rate.note(7, 1)
    assert rate.per_second == pytest.approx(7, rel=0.01)


def test_steps_of_prompts_are_measured_without_their_moves() -> None:
    measured = Costs()
    measured.note_step(num_rows=8, num_tokens=8, seconds=1, moved=Moved())
    assert measured.compute.per_second == 0, "decodes say nothing of prompts"
    measured.note_step(num_rows=2, num_tokens=100, seconds=3, moved=Moved(50, 1))
    assert measured.compute.per_second == 50
    assert measured.moves.per_second == 50


def test_hits_that_fail_to_come_turn_auto_to_swaps_and_one_is_tried_again_some_day() -> None:
    measured = costs(1e4, 1e9, 1.0)
    num_recomputed = 0
    for _ in range(400):
        if not measured.prefers_swap(victim(), AUTO, 100, BLOCK_BYTES):
            measured.note_restart(0, 992)
            num_recomputed += 1
    assert 2 <= num_recomputed <= 40
    for _ in range(60):
        measured.note_restart(992, 992)
    assert not measured.prefers_swap(victim(), AUTO, 100, BLOCK_BYTES)
