"""What errors of CUDA tell: each name that may come has a sentence, and what is short of memory is known as that."""

import re

import pytest

from kvkeeper.common.cuda.errors import MEANINGS, NAMES_BY_NUMBER, NAMES_BY_WORDS, CudaError


def test_an_error_tells_its_call_its_name_what_it_means_and_what_helps() -> None:
    text = str(CudaError("cudaIpcOpenMemHandle", "cudaErrorMapBufferObjectFailed"))
    assert text.startswith(
        "cudaIpcOpenMemHandle: cudaErrorMapBufferObjectFailed: memory of another process could not be mapped; run"
    )
    assert str(CudaError("cuMemMap", "CUDA_ERROR_INVALID_VALUE")) == "cuMemMap: CUDA_ERROR_INVALID_VALUE"


@pytest.mark.parametrize("name", ["cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"])
def test_no_memory_is_told_apart(name: str) -> None:
    assert CudaError("call", name).is_out_of_memory
    assert not CudaError("call", "cudaErrorNoDevice").is_out_of_memory


def test_runtime_and_driver_are_told_alike_by_names_that_both_have() -> None:
    for name, meaning in MEANINGS.items():
        assert re.fullmatch(r"cudaError[A-Z]\w+|CUDA_ERROR_[A-Z_]+", name)
        assert meaning.what
        assert meaning.mend
        assert not str(meaning).endswith(".")
    by_meaning = [
        {name.startswith("CUDA_ERROR_") for name, own in MEANINGS.items() if own is meaning} for meaning in MEANINGS.values()
    ]
    assert all(kinds == {False, True} for kinds in by_meaning)


def test_numbers_and_words_are_of_names_that_have_a_meaning() -> None:
    of_the_runtime = {name for name in MEANINGS if name.startswith("cudaError")}
    assert set(NAMES_BY_NUMBER.values()) == of_the_runtime
    assert len(NAMES_BY_NUMBER) == len(of_the_runtime)
    assert set(NAMES_BY_WORDS.values()) <= of_the_runtime


def test_errors_of_runtime_and_driver_stick_alike() -> None:
    sticky = {name for name, meaning in MEANINGS.items() if meaning.is_sticky}
    for of_runtime, of_driver in [
        ("cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cudaErrorECCUncorrectable", "CUDA_ERROR_ECC_UNCORRECTABLE"),
        ("cudaErrorContextIsDestroyed", "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    ]:
        assert {of_runtime, of_driver} <= sticky
    assert not sticky & {"cudaErrorMemoryAllocation", "cudaErrorNoDevice", "CUDA_ERROR_OUT_OF_MEMORY"}
