"""What errors of CUDA tell: each name that may come has a sentence, and what is short of memory is known as that."""

import re

import pytest

from kvkeeper.cuda.errors import MEANINGS, CudaError


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
