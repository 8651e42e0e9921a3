"""Type checkers of those who install the package read our types: each typed package ships the marker of PEP 561.

The marker of a package holds for the packages below it.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_of_kvkeeper_is_marked_as_typed_and_ships_the_mark() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    data, folders = setuptools["package-data"], setuptools["package-dir"]
    packages = setuptools["packages"]
    assert all(name.startswith("kvkeeper.") for name in packages)
    ours = [name for name in packages if name.rpartition(".")[0] not in packages]
    assert {"kvkeeper.client", "kvkeeper.engine.v1", "kvkeeper.cache_service"} <= set(ours)
    for name in ours:
        assert (ROOT / folders.get(name, name) / "py.typed").exists(), name
        assert "py.typed" in [*data.get(name, ()), *data.get("*", ())], name
