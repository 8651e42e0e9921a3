"""The folder of slabs: its size from the first moment, one owner, and nothing in it that is believed without being known."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.memory.disk.disk_directory import DiskDirectory, DiskRefused
from kvkeeper.common.service.memory_limit import OutOfMemory

SPEC = KvSpec(b"a spec", "model", 2, 4, 32, 4, 4)
SIZE = 1 << 20


def sizes(folder: Path) -> list[int]:
    """Bytes that the slabs and spares take on the disk."""
    found = [(path, path.with_suffix(".rows")) for path in folder.glob("*.kv")]
    return [sum(each.stat().st_blocks * 512 for each in pair if each.exists()) for pair in found]


def test_all_space_is_taken_at_start_and_never_more(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    directory = DiskDirectory(folder, SIZE, 2)
    directory.reserve()
    assert sizes(folder) == [SIZE, SIZE]
    slabs = [directory.obtain(replace(SPEC, key=name)) for name in (b"one", b"two")]
    assert sizes(folder) == [SIZE, SIZE]
    directory.give_back(slabs[0])
    third = directory.obtain(replace(SPEC, key=b"three"))
    assert len(sizes(folder)) == 2
    assert not slabs[0].path.exists()
    assert slabs[1].path.exists()
    assert not slabs[0].path.with_suffix(".rows").exists()
    for path in folder.glob("slab-*"):
        assert path.stat().st_mode & 0o777 == 0o600
    for slab in (*slabs, third):
        slab.close()
    directory.close()


def test_a_full_disk_is_a_refusal_at_start_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "disk"
    directory = DiskDirectory(folder, SIZE, 2)
    real, made = os.posix_fallocate, []

    def full(descriptor: int, start: int, length: int) -> None:
        made.append(length)
        if len(made) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, start, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskRefused, match=r"2 times --disk-memory 1 MiB does not fit.*No space left"):
        directory.reserve()
    assert sizes(folder) == []
    directory.close()


def test_one_service_has_the_folder(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path / "disk", SIZE, 1)
    with pytest.raises(DiskRefused, match="another cache service"):
        DiskDirectory(tmp_path / "disk", SIZE, 1)
    directory.close()
    DiskDirectory(tmp_path / "disk", SIZE, 1).close()


def test_a_slab_comes_back_and_one_of_another_size_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    key = _key_of(folder, SIZE)
    assert _key_of(folder, SIZE) == key
    assert _key_of(folder, 2 * SIZE) != key
    assert len(sizes(folder)) == 1


@pytest.mark.parametrize("harm", ["link", "two names", "header"])
def test_what_is_not_ours_is_set_aside_and_not_written(tmp_path: Path, harm: str) -> None:
    folder, other = tmp_path / "disk", tmp_path / "other"
    key = _key_of(folder, SIZE)
    (path,) = folder.glob("slab-*.kv")
    if harm == "link":
        path.rename(other)
        path.symlink_to(other)
    elif harm == "two names":
        os.link(path, other)
    else:
        with path.with_suffix(".rows").open("r+b") as file:
            file.write(b"something else")
    before = other.read_bytes() if other.exists() else b""
    assert _key_of(folder, SIZE) != key
    assert not other.exists() or other.read_bytes() == before
    assert len(list(folder.glob("aside-*"))) == (harm != "header")
    assert len(sizes(folder)) == 1


def test_blocks_that_are_too_large_are_refused_by_name(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path / "disk", SIZE, 1)
    directory.reserve()
    with pytest.raises(OutOfMemory, match="--disk-memory holds fewer than 2 blocks"):
        directory.obtain(replace(SPEC, page_bytes=SIZE))
    directory.close()


def _key_of(folder: Path, size: int) -> bytes:
    """The key of the slab that a run has for SPEC."""
    directory = DiskDirectory(folder, size, 1)
    directory.reserve()
    slab = directory.obtain(SPEC)
    key = slab.name_key
    slab.close()
    directory.close()
    return key
