"""The memory of a pool: real, shared, and refused in time."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.copies import Copies
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.common.service import memory_limit
from kvkeeper.common.service.memory_limit import OutOfMemory


def copies(*pairs: tuple[int, int]) -> Copies:
    sources, destinations = np.array(pairs, np.int32).reshape(-1, 2).T
    return Copies(sources, destinations)


def test_the_pages_of_an_arena_are_reserved_at_once() -> None:
    arena = SharedMemoryArena(1 << 20)
    assert os.fstat(arena.descriptor).st_blocks * 512 == 1 << 20
    assert not arena.array.any()
    arena.close()


def test_another_mapping_sees_the_same_bytes() -> None:
    arena = SharedMemoryArena(8192)
    other = mmap.mmap(arena.descriptor, 8192)
    arena.blocks(4, 1000)[3] = 9
    assert other[2999:3001] == b"\x00\x09"
    other[0] = 5
    assert arena.array[0] == 5
    other.close()
    arena.close()


def test_closing_gives_the_descriptor_back_also_while_a_view_lives() -> None:
    arena = SharedMemoryArena(8192)
    view = arena.blocks(2, 4096)
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(arena.descriptor)
    view[1] = 1  # still mapped here


def test_an_unused_arena_gives_its_descriptor_back() -> None:
    descriptor = SharedMemoryArena(8192).descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_more_memory_than_available_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: 4096)
    SharedMemoryArena(4096).close()
    with pytest.raises(OutOfMemory, match=r"4\.001 KiB are wanted, 4 KiB are available"):
        SharedMemoryArena(4097)


def test_copies_run_in_list_order() -> None:
    arena = SharedMemoryArena(12)
    arena.blocks(4, 3)[:] = np.arange(4, dtype=np.uint8)[:, None]
    arena.copy(copies((1, 2), (2, 3), (0, 1)), 3, None)
    assert arena.blocks(4, 3)[:, 0].tolist() == [0, 0, 1, 1]
    arena.close()


def test_no_copies_change_nothing() -> None:
    arena = SharedMemoryArena(4)
    arena.array[:] = 1
    arena.copy(copies(), 2, None)
    assert arena.array.all()
    arena.close()


def test_every_control_group_up_to_the_root_limits(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for folder, limit, used in (("a", 1000, 400), ("a/b", 5000, 10)):
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
    (tmp_path / "a" / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    assert sorted(memory_limit._cgroup_bytes(tmp_path, membership)) == [650, 4990]
    (tmp_path / "a" / "memory.max").write_text("max\n")
    assert memory_limit._cgroup_bytes(tmp_path, membership) == [4990]


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "memory" / "a").mkdir(parents=True)
    (tmp_path / "memory" / "a" / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory" / "a" / "memory.usage_in_bytes").write_text("300\n")
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/\n4:memory:/a\n0::/\n")
    assert memory_limit._cgroup_bytes(tmp_path, membership) == [700]


def test_the_machine_has_memory_left() -> None:
    assert 0 < memory_limit.available_bytes() < 1 << 50
