"""What a reader takes in at once: bounds on the lines of a file and of a function, and on the public methods of a class."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.source_tree import ROOT, name_of, package_roots

MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 60  # outside kernels, whose loops are written out
MOST_PUBLIC_METHODS = 30  # but of the clients', which mirror the API
_KERNELS = ROOT / "kernels"
_CLIENT = ROOT / "clients" / "python" / "kvkeeper" / "client"

# What is above its bound, with its size: it may shrink, and is taken off once it is within. Nothing is added.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
LARGE_CLASSES = {
    "engine_service/outputs/generation.py:Generation": 32,
}


def sources() -> Iterator[tuple[Path, str]]:
    """Files of the product that are not generated."""
    for root in package_roots():
        for file in sorted(root.rglob("*.py")):
            if not file.stem.endswith(("_pb2", "_pb2_grpc")):
                yield file, file.read_text()


def long_functions(source: str, most: int) -> dict[str, int]:
    """Functions with more lines than that, signature and docstring among them."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    return {name: size for name, size in sizes.items() if size > most}


def large_classes(source: str, most: int) -> dict[str, int]:
    """Classes with more public methods of their own than that."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            if (count := sum(not each.name.startswith("_") for each in methods)) > most:
                found[node.name] = count
    return found


def check(found: dict[str, int], known: dict[str, int]) -> None:
    """Hold what is above its bound to what is known of it."""
    grown = {name: size for name, size in found.items() if size > known.get(name, 0)}
    assert grown == {}, "too large: divide it by concept"
    assert set(known) - set(found) == set(), "within its bound now: take it off the list"


def test_no_file_is_too_long() -> None:
    sizes = {name_of(file): len(text.splitlines()) for file, text in sources()}
    assert len(sizes) > 400
    check({name: size for name, size in sizes.items() if size > MOST_LINES_OF_A_FILE}, LONG_FILES)


def test_no_function_is_too_long() -> None:
    found = {}
    for file, text in sources():
        if not file.is_relative_to(_KERNELS):
            found |= {f"{name_of(file)}:{name}": size for name, size in long_functions(text, MOST_LINES_OF_A_FUNCTION).items()}
    check(found, LONG_FUNCTIONS)


def test_no_class_has_too_many_methods() -> None:
    found = {}
    for file, text in sources():
        if not file.is_relative_to(_CLIENT):
            found |= {f"{name_of(file)}:{name}": size for name, size in large_classes(text, MOST_PUBLIC_METHODS).items()}
    check(found, LARGE_CLASSES)


def test_what_is_too_large_is_found() -> None:
    source = "class A:\n    def f(self):\n        pass\n    def g(self):\n        pass\n    def _h(self):\n        pass\n"
    assert long_functions(source, 1) == {"f": 2, "g": 2, "_h": 2}
    assert long_functions(source, 2) == {}
    assert large_classes(source, 1) == {"A": 2}
    assert large_classes(source, 2) == {}


@pytest.mark.parametrize(("found", "known"), [({"a": 2}, {"a": 1}), ({"a": 2}, {}), ({}, {"a": 2})])
def test_a_list_may_only_shrink(found: dict[str, int], known: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        check(found, known)
