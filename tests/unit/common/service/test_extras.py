"""What is printed for an extra that is not installed can be typed, and installs it."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from kvkeeper.common.service.extras import install_command, packages

ROOT = Path(__file__).parents[4]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_an_installation_that_is_no_checkout_gets_the_packages(extra: str, tmp_path: Path) -> None:
    assert sorted(map(names, packages(extra))) == sorted(map(names, EXTRAS[extra]))
    command = install_command(extra, tmp_path)
    assert all(f"'{package}'" in command for package in packages(extra))
    assert "kvkeeper[" not in command


def test_a_checkout_installs_itself_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("tracing").endswith(" install -e '.[tracing]'")
    monkeypatch.chdir(tmp_path)
    command = install_command("tracing")
    assert command.endswith(f" install -e '{ROOT}[tracing]'")
    pip = command.partition(" install ")[0]
    assert subprocess.run(["bash", "-c", f"{pip} --version"], capture_output=True, text=True, timeout=60).returncode == 0


def test_no_text_names_an_extra_by_the_packages_name() -> None:
    """It is on no index: pip would not find it."""
    folders = ("cache_service", "engine_service", "clients/python", "common", "kernels")
    files = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    assert len(files) > 100
    assert [str(path) for path in [*files, ROOT / "README.md"] if re.search(r"kvkeeper\[", path.read_text())] == []


def names(requirement: str) -> str:
    return re.split(r"[<>=!~]", requirement)[0].lower()
