"""Type checkers of those who install the package read our types: each typed package ships the marker of PEP 561.

The marker of a package holds for the packages below it.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_of_kvkeeper_is_marked_as_typed_and_ships_the_mark() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    generated = {path.parent for path in (ROOT / "protos" / "kvkeeper").rglob("*.proto")}
    ours = {path for path in (ROOT / "clients" / "python" / "kvkeeper").iterdir() if path.name != "__pycache__"} | generated
    assert {"client", "v1", "cache_service", "common"} <= {path.name for path in ours}
    assert [path for path in ours if not (path / "py.typed").exists()] == []
    assert "py.typed" in setuptools["package-data"]["*"]
