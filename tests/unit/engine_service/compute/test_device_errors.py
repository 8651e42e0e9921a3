"""Errors of a device as torch and Triton raise them: their names, what is said of them, and which of them end the process."""

import pytest
import torch

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.engine_service.compute.device.device_errors import DeviceFault, ReportedFault, find_fault, lost_by
from kvkeeper.engine_service.values.errors import DeviceLost
from tests.support.stand_ins.device_faults import accelerator_error, out_of_memory, triton_error

NO_MEMORY = "cudaErrorMemoryAllocation"


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (out_of_memory(), NO_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory."), NO_MEMORY),
        (accelerator_error(700), "cudaErrorIllegalAddress"),
        (accelerator_error(719, "words that nobody knows"), "cudaErrorLaunchFailure"),
        (accelerator_error(2, "out of memory"), NO_MEMORY),
        (accelerator_error(12345), "CUDA error 12345"),
        (torch.AcceleratorError("CUDA error: misaligned address\nand more"), "cudaErrorMisalignedAddress"),
        (RuntimeError("CUDA error: device-side assert triggered\nand more"), "cudaErrorAssert"),
        (RuntimeError("CUDA error: new words\nSearch for `cudaErrorInvalidPc' in https://docs"), "cudaErrorInvalidPc"),
        (RuntimeError("CUDA error: new words"), "CUDA error: new words"),
        (RuntimeError("CUDA driver error: out of memory"), NO_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), NO_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling x"), "CUBLAS_STATUS_EXECUTION_FAILED"),
        (triton_error("an illegal memory access was encountered"), "cudaErrorIllegalAddress"),
        (triton_error("out of memory"), NO_MEMORY),
        (CudaError("cuMemMap", "CUDA_ERROR_ILLEGAL_ADDRESS"), "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_error_of_a_device_has_a_name(error: Exception, name: str) -> None:
    fault = find_fault(error)
    assert fault is not None
    assert fault.name == name
    assert "\n" not in fault.text()


@pytest.mark.parametrize(
    "error",
    [ValueError("CUDA error: out of memory"), RuntimeError("a bug: CUDA error: out of memory"), MemoryError(), KeyError(700)],
    ids=repr,
)
def test_other_errors_are_of_no_device(error: Exception) -> None:
    assert find_fault(error) is None
    assert lost_by(error) is None


@pytest.mark.parametrize("number", [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810])
def test_errors_after_which_the_process_computes_nothing_more(number: int) -> None:
    lost = lost_by(accelerator_error(number, ""))
    assert lost is not None
    assert lost.fault.startswith("cudaError")
    assert "cudaError" not in str(lost), "clients are not summary"


@pytest.mark.parametrize("number", [1, 2, 3, 46, 79, 98, 209, 701, 712, 720, 801, 900, 901, 999])
def test_errors_after_which_it_goes_on(number: int) -> None:
    assert find_fault(accelerator_error(number, "")) is not None
    assert lost_by(accelerator_error(number, "")) is None


def test_short_memory_is_told_with_sizes_and_what_helps_here() -> None:
    fault = find_fault(out_of_memory())
    assert fault is not None
    assert fault.is_out_of_memory
    text = fault.text("a smaller model is smaller")
    assert text.startswith(
        f"{NO_MEMORY} (2.50 GiB were asked for, 640.50 MiB are free): the device has not so much memory left"
    )
    assert text.endswith("; a smaller model is smaller")
    assert "smaller" not in DeviceFault("cudaErrorAssert").text("a smaller model is smaller")
    assert DeviceFault("CUBLAS_STATUS_EXECUTION_FAILED").text("smaller") == "CUBLAS_STATUS_EXECUTION_FAILED"


def raised(error: Exception, following: Exception, *, is_cause: bool) -> Exception:
    """The second one, raised while the first one is handled, or because of it."""
    try:
        try:
            raise error
        except Exception as first:
            if is_cause:
                raise following from first
            raise following  # noqa: B904  # as a library that cleans up
    except Exception as second:
        return second


@pytest.mark.parametrize("is_cause", [True, False])
def test_what_an_error_came_of_counts_where_it_says_more(is_cause: bool) -> None:
    broken_off = accelerator_error(901, "operation failed due to a previous error during capture")
    fault = find_fault(raised(out_of_memory(), broken_off, is_cause=is_cause))
    assert fault is not None
    assert fault.is_out_of_memory
    lost = lost_by(raised(accelerator_error(700), out_of_memory(), is_cause=is_cause))
    assert lost is not None
    assert "cudaErrorIllegalAddress" in lost.fault
    assert lost_by(raised(accelerator_error(700), ValueError("a rank parted"), is_cause=is_cause)) is not None
    assert find_fault(raised(ValueError("a bug"), KeyError("another"), is_cause=is_cause)) is None


def test_a_lost_device_stays_the_same_error() -> None:
    lost = DeviceLost("why")
    assert lost_by(lost) is lost


def test_a_fault_that_another_process_told_is_as_one_of_this_process_and_says_where() -> None:
    summary = ReportedFault(DeviceFault("cudaErrorIllegalAddress", where="rank 1 on cuda:1"))
    lost = lost_by(summary)
    assert lost is not None
    assert lost.fault == str(summary)
    assert lost.fault.startswith("rank 1 on cuda:1: cudaErrorIllegalAddress: a kernel went wrong")
    short = ReportedFault(DeviceFault("cudaErrorMemoryAllocation", "much", "rank 2 on cuda:2"))
    assert lost_by(short) is None
    fault = find_fault(short)
    assert fault is not None
    assert fault.text("buy more").startswith("rank 2 on cuda:2: cudaErrorMemoryAllocation (much): ")
    assert fault.text("buy more").endswith("; buy more")
