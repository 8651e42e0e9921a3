"""The folder of the attach socket is open to this user only."""

from pathlib import Path

import pytest

from kvkeeper.cache_service.memory.private_directory import private_directory
from kvkeeper.common.service.listen import AddressInUse


def test_a_private_directory_is_made_and_checked(tmp_path: Path) -> None:
    assert private_directory(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    private_directory(tmp_path / "a" / "b")
    (tmp_path / "a" / "b").chmod(0o770)
    with pytest.raises(AddressInUse, match="0700"):
        private_directory(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(AddressInUse):
        private_directory(tmp_path / "file")
