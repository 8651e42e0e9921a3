"""What `--version` says: the package's version, and in a checkout the commit too, because a version stands for many commits."""

import subprocess
from pathlib import Path

from kvkeeper.common.service import VERSION

_SECONDS = 5.0  # for git to answer


def version_text(file: Path = Path(__file__)) -> str:
    """file: of the package, as it is installed."""
    root = next((folder for folder in file.resolve().parents if (folder / ".git").exists()), None)
    if root is None or not (root / "protos" / "kvkeeper").is_dir():  # an environment in another project's checkout
        return VERSION
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=, changed", "--abbrev=12", "--exclude=*"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):  # no git, or a folder of another user
        return f"{VERSION} (a checkout)"
    return f"{VERSION} (checkout {told.stdout.strip()})"
