"""No module needs itself: imports of files go round in no circle, not even those for types or inside of functions."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.contracts.source_tree import package_roots

_NAMESPACE = "kvkeeper"


def name_modules() -> dict[str, Path]:
    """Files of the product by the name under which they are imported."""
    found = {}
    for root in package_roots():
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root.parent).with_suffix("").parts
            found[".".join((_NAMESPACE, *parts)).removesuffix(".__init__")] = file
    return found


def find_imports(name: str, file: Path, source: str) -> Iterator[str]:
    """What a module imports, at any depth of its source: modules, and names in them, which may be modules."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join((*above, *([node.module] if node.module else ())))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def find_cycle(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in turn, the first once more at the end; none where there are no such."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    files = name_modules()
    known = ("client", "kernels.types", "engine_service.config", "common.service")
    assert {f"{_NAMESPACE}.{name}" for name in known} <= set(files)
    packages = {name for name, file in files.items() if file.name == "__init__.py"}
    imports = {}
    for name, file in files.items():
        needed = set(find_imports(name, file, file.read_text())) & set(files)
        # A package is imported with any of its modules; only a name that is taken from it is a need.
        imports[name] = {each for each in needed if each != name and not (each in packages and name.startswith(each + "."))}
    assert sum(map(len, imports.values())) > 1000
    assert find_cycle(imports) == []


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        ("import a.b", "a.b"),
        ("from .c import d", "a.b.c"),
        ("from ..c import d", "a.c.d"),
        ("from .. import c", "a.c"),
        ("if TYPE_CHECKING:\n    from .c import d", "a.b.c"),
        ("def f():\n    from .c import d", "a.b.c"),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, needed: str) -> None:
    assert needed in set(find_imports("a.b.m", Path("a/b/m.py"), source))


def test_a_circle_is_found() -> None:
    assert set(find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
