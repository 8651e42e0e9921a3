"""Conftest of all tests: the garbage collector looks at what the tests make, and not each time at all that they import."""

import gc
from collections.abc import Iterator

import pytest

from tests.support.slices import DAY, IS_WHOLE


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    part = "whole" if IS_WHOLE else f"the slice of {DAY} (KVKEEPER_TEST_DAY={DAY} replays it)"
    terminalreporter.write_line(f"of what is exhaustive ran: {part}")


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """Few objects hold the memory of the services of a module, so Python would look for them late, gigabytes later."""
    yield
    gc.collect()
