"""Type checkers of those who install the package read our types: each typed package ships the marker of PEP 561."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_of_kvkeeper_is_marked_as_typed_and_ships_the_mark() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    data, folders = setuptools["package-data"], setuptools["package-dir"]
    ours = [name for name in setuptools["packages"] if name.startswith("kvkeeper.")]
    assert {"kvkeeper.client", "kvkeeper.engine.v1"} <= set(ours)
    for name in ours:
        assert (ROOT / folders.get(name, name) / "py.typed").exists(), name
        assert "py.typed" in [*data.get(name, ()), *data.get("*", ())], name
