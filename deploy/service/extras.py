"""What to type for an optional part of the package that is not installed here.

The package is on no index, so its extras cannot be asked for by name: a checkout installs itself again with the extra, and an
installation from a wheel gets the packages that the extra stands for.
"""

import os
import shlex
import sys
from pathlib import Path

_PACKAGE = "kvkeeper"
_CHECKOUT = Path(__file__).resolve().parents[2]  # of deploy/service/extras.py


def install_command(extra: str, checkout: Path = _CHECKOUT) -> str:
    """One line that a shell takes, from the current directory."""
    if (checkout / "pyproject.toml").is_file() and (checkout / "clients" / "python").is_dir():
        wanted = [f".[{extra}]" if checkout == Path.cwd() else f"{checkout}[{extra}]"]
        return f"{_pip()} install -e {_quoted(wanted)}"
    return f"{_pip()} install {_quoted(packages(extra))}"


def packages(extra: str) -> list[str]:
    """What the extra stands for, as pip takes it. Empty where the package has no metadata here."""
    from importlib import metadata  # its import takes longer than all the rest, and it is seldom asked for

    try:
        required = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []
    parts = (text.partition(";") for text in required)
    return [name.strip() for name, _, marker in parts if marker.replace("'", '"').strip() == f'extra == "{extra}"']


def _pip() -> str:
    """That of the interpreter that runs, as short as it can be typed."""
    pip = Path(sys.executable).with_name("pip")
    if not pip.exists():
        return f"{shlex.quote(sys.executable)} -m pip"
    return shlex.quote(os.path.relpath(pip)) if pip.is_relative_to(Path.cwd()) else shlex.quote(str(pip))


def _quoted(words: list[str]) -> str:
    return " ".join(f"'{word}'" for word in words)
