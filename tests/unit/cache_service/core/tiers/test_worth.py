"""What a load is worth: lines through measurements, the length from which on loads pay, trials, and no flapping."""

import math
import random

import pytest

from kvkeeper.cache_service.core.tiers.worth import NEVER, Line, TierWorth

DEADLINE = 100.0


def line(first: float, each: float, counts: tuple[int, ...] = (1, 4, 8, 2, 16)) -> Line:
    found = Line()
    for count in counts:
        found.add(count, first + each * count)
    return found


def worth(token: float, first: float, block: float, *, is_on: bool = True) -> TierWorth:
    """Of a tier with blocks of 16 tokens: seconds that a token takes to compute, that a load takes first, and for a block."""
    found = TierWorth(line(0.01, token), 16, is_on=is_on)
    for at, count in enumerate((1, 4, 8, 2, 16)):
        found.note_load(count, first + block * count, now=float(at))
    return found


def test_a_line_finds_what_comes_first_and_what_each_item_takes() -> None:
    found = line(0.5, 0.25)
    assert (found.first, found.each) == (pytest.approx(0.5), pytest.approx(0.25))
    assert found.seconds(10) == pytest.approx(3.0)


def test_equal_counts_tell_no_first_part_and_noise_no_time_below_zero() -> None:
    same = line(0.5, 0.25, (8, 8, 8, 8))
    assert (same.first, same.each) == (pytest.approx(0.0), pytest.approx(2.5 / 8))
    falling = Line()
    for count, seconds in ((1, 4.0), (8, 1.0), (2, 4.0), (16, 0.5)):
        falling.add(count, seconds)
    assert falling.each > 0
    assert falling.first >= 0


def test_what_was_measured_long_ago_fades() -> None:
    found = line(0.5, 0.25)
    for _ in range(30):
        for count in (1, 4, 8):
            found.add(count, 0.1 + 0.01 * count)
    assert found.first == pytest.approx(0.1, rel=0.05)
    assert found.each == pytest.approx(0.01, rel=0.05)


def test_all_pays_before_enough_was_measured() -> None:
    found = TierWorth(line(0.0, 0.001), 16, is_on=True)
    for _ in range(3):
        assert found.admit(1, DEADLINE, now=0.0) == (1, False)
        found.note_load(1, 9.0, now=0.0)
    assert found.least_tokens == 0
    found.note_load(1, 9.0, now=0.0)
    assert found.least_tokens == NEVER
    unmeasured = TierWorth(Line(), 16, is_on=True)
    for _ in range(9):
        unmeasured.note_load(1, 9.0, now=0.0)
    assert unmeasured.num_paying(5, DEADLINE) == 5


def test_a_load_pays_from_the_length_on_where_it_beats_computing() -> None:
    found = worth(token=0.001, first=0.08, block=0.006)  # of 8 blocks, 0.128 s either way
    least = found.least_tokens // 16
    assert 5 <= least <= 10
    assert found.num_paying(least - 1, DEADLINE) == 0
    assert found.num_paying(least, DEADLINE) == least


def test_a_tier_that_is_slower_than_computing_never_pays() -> None:
    found = worth(token=0.001, first=0.0, block=0.03)
    assert found.least_blocks == math.inf
    assert found.least_tokens == NEVER
    assert found.num_paying(10_000, 10_000.0) == 0


def test_a_load_that_would_come_too_late_is_cut_or_not_ordered() -> None:
    found = worth(token=0.01, first=0.1, block=0.01)
    assert found.num_paying(1_000, deadline=1.0) == 70
    assert found.num_paying(1_000, deadline=0.1) == 0


def test_one_in_sixteen_that_does_not_pay_is_tried_and_so_is_one_after_a_minute() -> None:
    found = worth(token=0.001, first=0.0, block=0.03)
    answers = [found.admit(3, DEADLINE, now=10.0) for _ in range(32)]
    assert [at for at, answer in enumerate(answers) if answer == (3, True)] == [15, 31]
    assert set(answers) == {(3, True), (0, False)}
    assert found.num_unworthy == 30
    assert found.admit(3, DEADLINE, now=10.0) == (0, False)
    assert found.admit(3, DEADLINE, now=70.0) == (3, True)
    assert found.admit(3, DEADLINE, now=70.0) == (0, False)


def test_trials_find_a_tier_that_has_become_fast() -> None:
    found = worth(token=0.001, first=0.0, block=0.03)
    num_asked = 0
    while found.least_blocks == math.inf and num_asked < 2_000:
        num_asked += 1
        if found.admit(4, DEADLINE, now=10.0)[0]:
            found.note_load(4, 0.004, now=10.0)
    assert 16 <= num_asked < 1_000
    assert found.admit(4, DEADLINE, now=10.0) == (4, False)


def test_noise_moves_no_length_and_a_real_change_does() -> None:
    rng = random.Random(1)
    found = TierWorth(line(0.01, 0.001), 1, is_on=True)  # blocks of one token, so that every change shows
    counts = (500, 1000, 2000, 4000)

    def measure(speed: float) -> int:
        count = rng.choice(counts)
        found.note_load(count, (0.8 + 0.0002 * count) * rng.uniform(0.95, 1.05) / speed, now=0.0)
        return found.least_tokens

    for _ in range(50):
        measure(1.0)
    lengths = [measure(1.0) for _ in range(200)]
    assert len(set(lengths)) <= 5
    assert max(lengths) < 1.3 * min(lengths)
    for _ in range(30):
        measure(5.0)
    assert found.least_tokens < min(lengths) / 3


def test_where_it_is_off_every_load_pays_and_is_measured() -> None:
    found = worth(token=0.001, first=0.0, block=0.03, is_on=False)
    assert found.admit(3, DEADLINE, now=0.0) == (3, False)
    assert found.least_tokens == NEVER
