"""Device memory by descriptors: the order of the driver's calls, what stays when a side lets go, and nothing left behind."""

import os

import numpy as np
import pytest

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.vmm import DescribedArena, MappedArena, VmmDriver, described_arena
from tests.support.stand_ins.fake_cuda import DEVICE, FakeCuda, bytes_at
from tests.support.stand_ins.fake_libcuda import GRANULARITY, FakeLibcuda

_CALLS = ("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle")


def process(capacity: int = 1 << 40) -> tuple[FakeLibcuda, VmmDriver]:
    library = FakeLibcuda(capacity)
    return library, VmmDriver(lambda: library)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_two_processes_see_the_same_bytes_and_the_descriptor_alone_keeps_them() -> None:
    makers, maker = process()
    takers, taker = process()
    before = num_open()
    size = maker.whole(0, GRANULARITY + 1)
    assert size == 2 * GRANULARITY
    pointer, descriptor = maker.make(0, size)
    there = taker.map(0, descriptor, size)
    assert makers.handles == takers.handles == {}, "mapping and descriptor are enough"
    bytes_at(pointer, size)[:] = 7
    assert bytes_at(there, size)[-1] == 7
    bytes_at(there, size)[0] = 9
    maker.unmap(pointer, size)
    taker.unmap(there, size)
    again = taker.map(0, descriptor, size)
    assert bytes_at(again, size)[:2].tolist() == [9, 7]
    taker.unmap(again, size)
    os.close(descriptor)
    assert (makers.reserved, takers.reserved) == ({}, {})
    assert num_open() == before


@pytest.mark.parametrize("call", _CALLS)
def test_a_call_that_fails_is_named_and_leaves_nothing(call: str) -> None:
    library, driver = process()
    driver.whole(0, 1)
    before = num_open()
    library.fail_in = call
    with pytest.raises(CudaError, match=f"^{call}: CUDA_ERROR_NOT_PERMITTED: the system does not permit the call; see "):
        driver.make(0, GRANULARITY)
    assert (library.handles, library.mapped, library.reserved) == ({}, {}, {})
    assert num_open() == before


def test_what_no_driver_exported_is_refused() -> None:
    library, driver = process()
    with open(os.devnull) as other:
        with pytest.raises(CudaError, match="cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE"):
            driver.map(0, other.fileno(), GRANULARITY)
    _, descriptor = driver.make(0, GRANULARITY)
    with pytest.raises(CudaError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        driver.map(0, descriptor, 2 * GRANULARITY)
    os.close(descriptor)
    assert (library.handles, len(library.reserved)) == ({}, 1)


def test_a_full_device_is_told_as_one() -> None:
    _, driver = process(capacity=GRANULARITY)
    with pytest.raises(CudaError) as refused:
        driver.make(0, 2 * GRANULARITY)
    assert refused.value.is_out_of_memory


def test_without_the_library_the_first_call_says_so() -> None:
    with pytest.raises(CudaError, match=r"libcuda.so.1 is not installed|cuInit: CUDA_ERROR"):
        VmmDriver().whole(0, 1)


ARENA = DescribedArena(DEVICE, 5000, GRANULARITY)


def test_a_description_crosses_as_json() -> None:
    assert described_arena(ARENA.as_fields()) == ARENA


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"device_uuid": "AB" * 16}, "device_uuid"),
        ({"num_bytes": -1}, "num_bytes"),
        ({"num_bytes": True}, "num_bytes"),
        ({"mapped_bytes": "4096"}, "mapped_bytes"),
        ({"mapped_bytes": 4999}, "mapped_bytes"),
    ],
)
def test_anything_else_is_no_description(change: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        described_arena(ARENA.as_fields() | change)


def test_the_witness_is_closed_after_the_mapping_and_with_a_refusal(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its end is what tells the service that nothing writes any more."""
    library, driver = process()
    pointer, descriptor = driver.make(0, GRANULARITY)
    driver.unmap(pointer, GRANULARITY)
    runtime = FakeCuda(tmp_path_factory.mktemp("device"), "engine")
    mine, kept = os.pipe()
    mapped = MappedArena(runtime, driver, ARENA, descriptor, kept)
    assert np.all(bytes_at(mapped.pointer, 5000) == 0xA5)
    order: list[str] = []
    unmap = driver.unmap
    driver.unmap = lambda *at: (order.append(f"unmap, witness open: {_is_open(kept)}"), unmap(*at))[1]  # type: ignore[method-assign]
    mapped.close()
    mapped.close()
    assert order == ["unmap, witness open: True"]
    assert not _is_open(kept) and library.mapped == {}
    again = os.dup(mine)
    runtime.uuids = ()
    with pytest.raises(CudaError, match="not visible"):
        MappedArena(runtime, driver, ARENA, descriptor, again)
    assert not _is_open(again)
    for one in (mine, descriptor):
        os.close(one)


def _is_open(descriptor: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")
