"""Conftest of all tests: the garbage collector looks at what the tests make, and not each time at all that they import."""

import gc
from collections.abc import Iterator

import pytest


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """Few objects hold the memory of the services of a module, so Python would look for them late, gigabytes later."""
    yield
    gc.collect()
