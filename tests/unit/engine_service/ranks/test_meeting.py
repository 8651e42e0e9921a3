"""Sums over ranks that fail: of another rank, or of this one's own device; and what the library may do then."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvkeeper.engine_service.compute.device.device_errors import find_fault
from kvkeeper.engine_service.model.split import Split
from kvkeeper.engine_service.ranks import meeting
from kvkeeper.engine_service.ranks.meeting import Meeting
from kvkeeper.engine_service.ranks.messages import SumFailed
from tests.support.stand_ins.device_faults import accelerator_error, out_of_memory
from tests.support.worlds.rank_threads import over_gloo

NCCL = "NCCL error in: ProcessGroupNCCL.cpp:1, {}, NCCL version 2.27\nnccl{}: a call failed.\nLast error:\n{}"
VARIABLES = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"


def met(error: Exception) -> Meeting:
    def fail(*parts: object) -> None:
        raise error

    made = Meeting(2)
    made._group = SimpleNamespace(allreduce=fail)
    return made


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (accelerator_error(700), "cudaErrorIllegalAddress"),
        (out_of_memory(), "cudaErrorMemoryAllocation"),
        (
            RuntimeError(NCCL.format("unhandled cuda error", "UnhandledCudaError", "Cuda failure 2 'out of memory'")),
            "cudaErrorMemoryAllocation",
        ),
        (
            RuntimeError(NCCL.format("unhandled cuda error", "UnhandledCudaError", "Cuda failure 'misaligned address'")),
            "cudaErrorMisalignedAddress",
        ),
    ],
)
def test_a_sum_that_the_own_device_fails_is_no_loss_of_another_rank(error: Exception, name: str) -> None:
    with pytest.raises(type(error)) as failed:
        met(error).add_up(torch.zeros(1))
    assert failed.value is error
    fault = find_fault(error)
    assert fault is not None
    assert fault.name == name


@pytest.mark.parametrize(
    "words",
    ["Connection closed by peer [127.0.0.1]:5", NCCL.format("remote process exited", "RemoteError", "socketPollConnect")],
)
def test_a_sum_that_another_rank_fails_is_its_loss(words: str) -> None:
    with pytest.raises(SumFailed):
        met(RuntimeError(words)).add_up(torch.zeros(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_ranks_have_is_added_up_and_gathered_and_shared(tmp_path: Path, dtype: torch.dtype) -> None:
    def work(split: Split) -> list[Any]:
        own = torch.full((2, 3), split.rank + 1.0, dtype=dtype)
        parts, none = split.together.gather(own.T), split.together.gather(own[:0])
        ids = split.together.share(torch.arange(4) + split.rank)
        gathered = None if parts is None or none is None else (parts.float().tolist(), list(none.shape))
        return [gathered, ids.tolist(), split.together.add_up(own).float().tolist()]

    both = [[0, 1, 2, 3], [[3.0] * 3] * 2]
    gathered = [[[1.0] * 2] * 3, [[2.0] * 2] * 3], [2, 0, 3]
    assert over_gloo(2, tmp_path / "store", work) == [[gathered, *both], [None, *both]]


@pytest.mark.parametrize("own", [None, "7"])
def test_the_watchdog_of_nccl_may_not_end_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str | None) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
        if own is not None:
            monkeypatch.setenv(variable, own)
    found: list[str] = []

    def made(*parts: Any) -> object:
        found.extend(os.environ[variable] for variable in VARIABLES)
        return object()

    made.Options = SimpleNamespace  # type: ignore[attr-defined]
    nccl: Any = SimpleNamespace(FileStore=meeting.dist.FileStore, ProcessGroupNCCL=made)
    monkeypatch.setattr(meeting, "dist", nccl)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Meeting, "add_up", lambda *parts: None)
    monkeypatch.setattr(torch, "zeros", lambda *parts, **more: None)
    Meeting(2).join(tmp_path / "store", 0, torch.device("cuda:0"), 1.0)
    assert found == (["2", "0"] if own is None else [own, own])
