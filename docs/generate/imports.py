"""docs/inside/imports.md: which folder imports which, from the import statements themselves."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

import grimp

from docs.generate.markdown import head

_INTRO = """\
An arrow leads from what imports to what is imported; boxes are folders, round ones are modules. An arrow that follows from
others is left out. `make lint` holds the directions, by the contracts in `pyproject.toml`."""
# By title, the package whose members are drawn.
_PICTURES = {
    "The packages of kvkeeper": "kvkeeper",
    "What all of them stand on": "kvkeeper.common",
    "The cache service": "kvkeeper.cache_service",
    "The core of the cache service": "kvkeeper.cache_service.core",
    "The engine service": "kvkeeper.engine_service",
}
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_LEFT_OUT = {"__main__", "unimplemented"}

Edges = dict[str, set[str]]


def page() -> str:
    graph = grimp.build_graph(*packages(), cache_dir=None)
    lines = head("Who imports what", _INTRO)
    for title, package in _PICTURES.items():
        edges = edges_between(graph, _members(graph, package))
        lines += [f"## {title}", "", *_picture(graph, package, edges), ""]
        if circles := circles_of(edges):
            lines += ["In a circle: " + "; ".join(", ".join(f"`{name}`" for name in sorted(one)) for one in circles) + ".", ""]
    return "\n".join(lines).rstrip() + "\n"


def packages() -> list[str]:
    """Every top-level package of ours, but those that are generated from the protos."""
    checked = tomllib.loads(_PROJECT.read_text())["tool"]["importlinter"]["root_packages"]
    return [name for name in checked if not name.endswith(".v1")]


def edges_between(graph: grimp.ImportGraph, members: Iterable[str]) -> Edges:
    """By the full name of each member, the other members that it imports, or a module in it."""
    members = sorted(members)
    return {
        one: {
            other
            for other in members
            if other != one and graph.direct_import_exists(importer=one, imported=other, as_packages=True)
        }
        for one in members
    }


def circles_of(edges: Edges) -> list[set[str]]:
    """Members that import each other, directly or over others."""
    reach = {one: _reach(edges, one) for one in edges}
    circles = {frozenset(other for other in reach[one] if one in reach[other]) for one in edges if one in reach[one]}
    return sorted((set(one) for one in circles), key=sorted)


def _members(graph: grimp.ImportGraph, package: str) -> list[str]:
    children = packages() if package == "kvkeeper" else graph.find_children(package)
    return [one for one in children if one.rpartition(".")[2] not in _LEFT_OUT]


def _reach(edges: Edges, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in edges[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found


def _picture(graph: grimp.ImportGraph, package: str, edges: Edges) -> list[str]:
    lines = ["```mermaid", "graph TD"]
    for one in edges:
        name = one.rpartition(".")[2]
        is_folder = bool(graph.find_children(one))
        lines.append(f'    {name}["{name}/"]' if is_folder else f'    {name}("{name}")')
    for one, others in edges.items():
        follows = {far for other in others for far in _reach(edges, other) if not _reach(edges, far) & {one, other}}
        lines += [f"    {one.rpartition('.')[2]} --> {other.rpartition('.')[2]}" for other in sorted(others - follows)]
    return [*lines, "```"]
