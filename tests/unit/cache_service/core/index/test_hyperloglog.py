"""HyperLogLog: the estimate beside the true number, from none to a million."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.reach import UInt64Array, add_hashes, no_registers, num_distinct


def hashes(count: int, seed: int = 1) -> UInt64Array:
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


@pytest.mark.parametrize("count", [0, 1, 2, 100, 5_000, 20_000, 1_000_000])
def test_the_estimate_is_within_three_errors(count: int) -> None:
    registers = no_registers()
    add_hashes(registers, hashes(count))
    assert num_distinct(registers) == pytest.approx(count, rel=0.035, abs=0.1)


def test_what_is_added_again_counts_once_and_two_merge_by_the_greater() -> None:
    one, other = no_registers(), no_registers()
    for _ in range(3):
        add_hashes(one, hashes(3_000))
    assert num_distinct(one) == pytest.approx(3_000, rel=0.035)
    add_hashes(other, np.concatenate([hashes(3_000), hashes(3_000, seed=2)]))
    assert num_distinct(np.maximum(one, other)) == num_distinct(other) == pytest.approx(6_000, rel=0.035)


def test_hashes_at_the_ends_of_the_range_have_a_place() -> None:
    registers = no_registers()
    add_hashes(registers, np.array([0, 2**64 - 1, 1, 2**51 - 1, 2**51], np.uint64))
    assert registers[0] == 52  # of the hash 0, the highest rank that there is
    assert num_distinct(registers) > 0
