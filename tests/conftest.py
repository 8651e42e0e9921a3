"""Conftest of all tests: chooses the cases of a day, and keeps the garbage collector from all that the tests import."""

import gc
from collections import defaultdict
from collections.abc import Iterator, Set

import pytest

from tests.support.slices import DAY, IS_WHOLE, covering, scaled, todays


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "each_value: a day runs each value of each parameter, a whole run all combinations")
    config.addinivalue_line("markers", "in_turn: of the tests of a file, which take long, a day runs a third, a whole run all")


@pytest.hookimpl(trylast=True)  # of what -k has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for another day, as the markers say."""
    tests: dict[object, list[pytest.Function]] = defaultdict(list)
    files: dict[object, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("each_value"):
            tests[item.parent, item.function].append(item)
        if isinstance(item, pytest.Function) and item.get_closest_marker("in_turn"):
            files[item.path][item.originalname].append(item)
    left_out: set[pytest.Item] = {item for cases in tests.values() for item in set(cases).difference(covering(cases, _values))}
    for functions in files.values():
        for name in functions.keys() - todays(list(functions), scaled(len(functions) + 2, 3)):
            left_out |= {*functions[name]}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _values(item: pytest.Function) -> Set[tuple[str, int]]:
    """Each parameter of it and which object it is."""
    return {(name, id(value)) for name, value in item.callspec.params.items()}


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
