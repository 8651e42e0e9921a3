"""Arenas on a device that a holder has: what they cost the folder, and what a failure leaves."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.copies import Copies
from kvkeeper.cache_service.memory.device.cuda import PinnedArena
from kvkeeper.cache_service.memory.device.held_memory import HeldMemory
from kvkeeper.cache_service.memory.kept.description import Description
from kvkeeper.cache_service.memory.kept.memory_directory import MemoryDirectory, kept_bytes
from kvkeeper.cache_service.memory.private_file import FileRefused
from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.vmm import VmmDriver
from kvkeeper.common.service.memory_limit import OutOfMemory
from tests.support.stand_ins.fake_cuda import FakeCuda
from tests.support.stand_ins.fake_libcuda import GRANULARITY, FakeLibcuda
from tests.support.worlds.memory_folder import SPEC, memory_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


def opened(folder: Path, tmp_path: Path, library: FakeLibcuda, *, can_pin: bool = True) -> MemoryDirectory:
    """Without a holder, which nothing here waits for."""
    runtime = FakeCuda(tmp_path, "service", can_pin=can_pin)
    memory = HeldMemory(runtime, VmmDriver(lambda: library), 0, f"unix:{tmp_path}/none", folder)
    return MemoryDirectory(folder, keep=True, memory=memory)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_its_file_takes_no_memory_and_closing_leaves_none(folder: Path, tmp_path: Path) -> None:
    library, before = FakeLibcuda(), num_open()
    directory = opened(folder, tmp_path, library)
    arena = directory.allocate(GRANULARITY)
    assert arena.fields()["mapped_bytes"] == 2 * GRANULARITY, "there is a page more, for the stamp"
    assert not any(arena.read(0, GRANULARITY))
    assert kept_bytes(folder) == 0
    assert len(arena.descriptors()) == 2
    hosts = directory.allocate_host(1 << 20)
    assert kept_bytes(folder) > 1 << 20
    hosts.close()
    arena.close()
    directory.close()
    assert (library.handles, library.mapped, library.reserved) == ({}, {}, {})
    assert num_open() == before


def test_a_host_tier_that_no_pool_used_is_found_again_pinned_and_is_no_pools_memory(folder: Path, tmp_path: Path) -> None:
    """Also where pools and host tiers have one size: the memory of a pool is on the device."""
    directory = opened(folder, tmp_path, FakeLibcuda())
    directory.allocate_host(GRANULARITY).close()
    directory.close()
    directory = opened(folder, tmp_path, FakeLibcuda())
    spares, hosts = directory.open_spares((GRANULARITY, 1), (GRANULARITY, 1))
    assert not spares
    (arena,) = hosts
    assert isinstance(arena, PinnedArena)
    arena.close()
    directory.close()


def test_copies_run_on_the_device_and_to_the_host_tier(folder: Path, tmp_path: Path) -> None:
    directory = opened(folder, tmp_path, FakeLibcuda())
    arena, hosts = directory.allocate(8 * SPEC.block_bytes), np.zeros((4, SPEC.block_bytes), np.uint8)
    arena.write(SPEC.block_bytes, b"\7" * SPEC.block_bytes)
    arena.copy(Copies(np.array([1], np.int32), np.array([2], np.int32)), SPEC.block_bytes, hosts)
    assert arena.read(2 * SPEC.block_bytes, 2) == b"\7\7" and arena.read(3 * SPEC.block_bytes, 1) == b"\0"
    arena.close()
    directory.close()


def test_a_header_names_a_place_or_none() -> None:
    for place in (("ab" * 16, "12" * 8), ("", "")):
        description = Description(1, 1, 2, 2 * SPEC.block_bytes, SPEC, 0, *place)
        assert Description.decode(description.encode()) == description
    for device, name in (("ab" * 16, ""), ("", "12" * 8), ("xy" * 16, "12" * 8), ("ab" * 16, "../../12345678ab"), ("ab", "12")):
        with pytest.raises(FileRefused, match="names no place"):
            Description.decode(Description(1, 1, 2, 2 * SPEC.block_bytes, SPEC, 0, device, name).encode())
    assert b"held" not in Description(1, 1, 2, 2 * SPEC.block_bytes, SPEC).encode(), "as it was before there were others"


def test_memory_that_cannot_be_had_is_told_and_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    directory, before = opened(folder, tmp_path, FakeLibcuda(capacity=GRANULARITY), can_pin=False), num_open()
    with pytest.raises(OutOfMemory, match="4 MiB could not be had on the device"):
        directory.allocate(2 * GRANULARITY)
    with pytest.raises(CudaError, match="cudaHostRegister"):
        directory.allocate_host(1 << 20)
    assert [path.name for path in folder.iterdir()] == ["lock"]
    assert num_open() == before
    directory.close()


def test_memory_that_no_pool_has_used_is_not_left_behind(folder: Path, tmp_path: Path) -> None:
    directory = opened(folder, tmp_path, FakeLibcuda())
    directory.allocate(GRANULARITY).close()
    directory.close()
    directory = opened(folder, tmp_path, FakeLibcuda())
    assert directory.open_pools() == []
    assert [path.name for path in folder.iterdir()] == ["lock"]
    directory.close()
