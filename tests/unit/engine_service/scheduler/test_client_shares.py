"""The many sequences of a client wait for the few of another, as far as they would make the step slow, and take turns."""

from collections import Counter

import numpy as np
import pytest

from kvkeeper.engine_service.scheduler.client_shares import DecodeCosts, equal_shares, most_decodes, out_of_share


def costs(fixed_s: float, each_s: float, sizes: list[int]) -> DecodeCosts:
    made = DecodeCosts()
    for size in sizes:
        made.note(size, fixed_s + each_s * size)
    return made


def test_the_line_through_the_steps_is_found() -> None:
    assert costs(0.004, 0.0002, [1, 4, 9, 30, 12] * 20).fixed_sequences == pytest.approx(20)
    assert costs(0.0, 0.001, [1, 4, 9, 30]).fixed_sequences == pytest.approx(0, abs=1e-6)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    made = costs(0.004, 0.0002, [1, 4, 9, 30] * 20)
    for size in [1, 4, 9, 30] * 100:
        made.note(size, 0.001 + 0.0005 * size)
    assert made.fixed_sequences == pytest.approx(2, rel=0.05)


def test_where_no_price_shows_steps_grow_no_faster_than_it_could() -> None:
    assert costs(0.004, 0.0002, []).fixed_sequences is None
    for sizes in ([5], [5] * 100):
        assert costs(0.004, 0.0002, sizes).fixed_sequences == 10
    assert costs(0.004, -0.0001, [1, 9, 4, 30]).fixed_sequences == 60, "noise, not a price"
    assert costs(0.004, 0.0, [30] + [5] * 100).fixed_sequences == pytest.approx(10), "of late"


def test_free_sequences_all_decode_after_a_few_steps() -> None:
    made, size, sizes = DecodeCosts(), 2, []
    while size < 256:
        made.note(size, 0.004)
        assert made.fixed_sequences is not None
        size = min(256, most_decodes(np.array([1, 255]), made.fixed_sequences))
        sizes.append(size)
    assert sizes == [6, 14, 30, 62, 126, 254, 256]


def test_a_step_takes_no_longer_than_its_clients_one_after_the_other() -> None:
    for counts in ([1, 200], [3, 50, 50], [1, 1, 1, 90]):
        fixed, each = 0.004, 0.0002
        most = most_decodes(np.array(counts), fixed / each)
        alone = fixed + each * min(counts)
        assert fixed + each * most <= len(counts) * alone + 1e-9
        assert fixed + each * (most + 1) > len(counts) * alone


def test_small_clients_have_all_that_they_want_and_the_others_equal_shares() -> None:
    assert equal_shares(np.array([1, 200]), 21).tolist() == [1, 20]
    assert equal_shares(np.array([40, 2, 30, 1]), 23).tolist() == [10, 2, 10, 1]
    assert sorted(equal_shares(np.array([9, 9, 9]), 10).tolist()) == [3, 3, 4]


def test_in_turns_all_sequences_of_a_client_decode_as_often() -> None:
    clients = np.array([7] * 10 + [3] + [7] * 15, np.int32)
    decoded: Counter[int] = Counter()
    for turn in range(50):
        waiting = set(out_of_share(clients, 8.0, turn).tolist())
        assert 10 not in waiting, "the other client's only sequence decodes in each step"
        assert len(waiting) == 26 - 10
        decoded.update(set(range(26)) - waiting)
    assert decoded.pop(10) == 50
    assert set(decoded.values()) == {50 * 9 // 25}


def test_one_client_or_cheap_sequences_leave_out_none() -> None:
    assert not len(out_of_share(np.full(200, 5, np.int32), 0.0, 3))
    assert not len(out_of_share(np.array([1] * 200 + [2], np.int32), 1000.0, 3))
    assert not len(out_of_share(np.empty(0, np.int32), 1.0, 3))


def test_what_a_step_costs_is_never_told_far_beyond_what_was_measured() -> None:
    costs = DecodeCosts()
    assert costs.estimate_seconds(1) is None
    for num_tokens in (1, 3) * 40:
        costs.note(num_tokens, 0.002 * num_tokens)
    told = [costs.estimate_seconds(num_tokens) for num_tokens in (0, 1, 2, 300)]
    assert told == pytest.approx([0.001, 0.002, 0.004, 0.004], rel=0.05)
    for num_tokens in (1, 3) * 40:
        costs.note(num_tokens, 0.010 - 0.002 * num_tokens)  # noise may turn the line
    assert 0 < costs.estimate_seconds(300) <= 0.008
