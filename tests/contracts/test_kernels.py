"""The host's part of a launch counts sizes in plain integers, by kernels/gpu/sizes.py, which says why."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.source_tree import ROOT, name_of

SLOW = {"cdiv", "next_power_of_2"}
_FROM = {"triton", "tl", "triton.language"}  # as they are imported


def _is_jitted(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)


def _host_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All but those of kernels, which have Triton's own."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not _is_jitted(child):
            yield from _host_nodes(child)


def slow_sizes(source: str) -> list[str]:
    """Triton's own arithmetic of sizes in host code."""
    found = []
    for node in _host_nodes(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in SLOW and ast.unparse(node.value) in _FROM:
            found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and node.module in _FROM:
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name in SLOW]
    return found


def files() -> list[Path]:
    return sorted((ROOT / "kernels").rglob("*.py"))


def test_no_launch_pays_for_the_arithmetic_of_kernels() -> None:
    sources = {name_of(file): file.read_text() for file in files()}
    assert sum("@triton.jit" in source for source in sources.values()) > 10
    assert {name: slow for name, source in sources.items() if (slow := slow_sizes(source))} == {}


@pytest.mark.parametrize(
    ("source", "num_slow"),
    [
        ("grid = triton.cdiv(8, 3)", 1),
        ("def launch(n):\n    kernel[(triton.next_power_of_2(n),)](T=tl.cdiv(n, 2))", 2),
        ("from triton import cdiv", 1),
        ("@triton.jit(do_not_specialize=['n'])\ndef kernel(n):\n    return tl.cdiv(n, 2)", 0),
        ("from .sizes import cdiv, power_of_2\ngrid = cdiv(8, 3)", 0),
    ],
)
def test_slow_arithmetic_is_found(source: str, num_slow: int) -> None:
    assert len(slow_sizes(source)) == num_slow
