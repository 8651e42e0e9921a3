"""Conftest of all tests: what a lane has imported is no business of the garbage collector.

A collection looks at all objects once those that are new are a quarter of the old ones. A lane imports millions of objects, so
that services of hundreds of tests, each with its memory, would wait to be collected: gigabytes.
"""

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
