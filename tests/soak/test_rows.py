"""A short slice of the soak: the same units, by their first seeds. A day runs a row of each promise."""

from collections.abc import Iterator

import pytest
import structlog

from tests.soak.row import Row
from tests.soak.rows import ROWS
from tests.soak.worker import quiet
from tests.support.slices import covering, scaled, todays

IN_TESTS = [row for row in ROWS if row.num_ci_seeds]


@pytest.fixture(autouse=True)
def _quiet_services() -> Iterator[None]:
    quiet()
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("row", covering(IN_TESTS, lambda row: {row.number}), ids=lambda row: row.key)
def test_row(row: Row) -> None:
    counts = [row.run(seed) for seed in todays(range(row.num_ci_seeds), max(scaled(row.num_ci_seeds, 4), 4))]
    print(row.key, counts)
    assert sum(count.done for count in counts) > 0
    assert sum(count.faults for count in counts) > 0, "the fault never fired"


def test_every_promise_has_a_row() -> None:
    assert {row.number for row in ROWS} >= {*range(1, 20), 22, 25, 26, 30, 31, 32, 34, 38, 39}
    assert len({row.key for row in ROWS}) == len(ROWS)
