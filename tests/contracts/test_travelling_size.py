"""What travels to a machine with a device that reaches no network: the files that git tracks, and the bundle beside them."""

import subprocess
from pathlib import Path

import pytest

from tests.contracts.source_tree import ROOT
from tests.gpu.bundle import MOST_BYTES as MOST_OF_BUNDLE

MOST_BYTES = 60 << 20  # that such a machine takes


def tracked_bytes(root: Path) -> int:
    """Of all files that git tracks there, as they lie in the folder."""
    told = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
    paths = [root / name.decode() for name in told.split(b"\0") if name]
    assert len(paths) > 500
    return sum(path.lstat().st_size for path in paths if path.exists())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only git knows which files it tracks")
def test_the_tree_and_the_bundle_fit_what_a_machine_takes() -> None:
    assert tracked_bytes(ROOT) + MOST_OF_BUNDLE <= MOST_BYTES
