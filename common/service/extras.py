"""Which optional parts of the package are not installed here, and what to type for one.

The package is on no index, so its extras cannot be asked for by name: a checkout installs itself again with the extra, and an
installation from a wheel gets the packages that the extra stands for.
"""

import importlib.util
import os
import shlex
import sys
from pathlib import Path

_PACKAGE = "kvkeeper"
_CHECKOUT = Path(__file__).resolve().parents[2]  # of common/service/extras.py


def missing(*modules: str) -> list[str]:
    """Those that cannot be imported; none of them is imported to find out, except for the parents of a dotted name."""
    return [name for name in modules if not _is_installed(name)]


def install_command(extra: str, checkout: Path = _CHECKOUT) -> str:
    """One line that a shell takes, from the current directory."""
    if (checkout / "pyproject.toml").is_file() and (checkout / "clients" / "python").is_dir():
        wanted = [f".[{extra}]" if checkout == Path.cwd() else f"{checkout}[{extra}]"]
        return f"{_pip()} install -e {_quoted(wanted)}"
    return f"{_pip()} install {_quoted(packages(extra))}"


def packages(extra: str) -> list[str]:
    """The requirements that the extra stands for, as pip takes them. Empty where the package has no metadata here."""
    from importlib import metadata  # its import takes longer than all the rest, and it is seldom asked for

    try:
        required = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []
    ours = f'extra == "{extra}"'
    parts = (text.replace("'", '"').partition(";") for text in required)
    return [_requirement(name, marker, ours) for name, _, marker in parts if marker.endswith(ours)]


def _requirement(name: str, marker: str, ours: str) -> str:
    """With the conditions of the marker beside the extra, such as a platform."""
    condition = marker.removesuffix(ours).strip().removesuffix("and").strip()
    return f"{name.strip()}; {condition}" if condition else name.strip()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _pip() -> str:
    """That of the interpreter that runs, as short as it can be typed."""
    pip = Path(sys.executable).with_name("pip")
    if not pip.exists():
        return f"{shlex.quote(sys.executable)} -m pip"
    return shlex.quote(os.path.relpath(pip)) if pip.is_relative_to(Path.cwd()) else shlex.quote(str(pip))


def _quoted(words: list[str]) -> str:
    return " ".join(f"'{word}'" for word in words)
