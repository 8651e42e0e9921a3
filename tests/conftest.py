"""Conftest of all tests: the garbage collector looks at what the tests make, and not each time at all that they import."""

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
