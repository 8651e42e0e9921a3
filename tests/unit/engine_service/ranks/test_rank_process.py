"""What a rank says when it fails: to the first one of its device, and what that means; to its log of anything else."""

import json
import socket
from typing import Any

import pytest
import torch
from grpc import StatusCode
from structlog.testing import capture_logs

from kvkeeper.client import arena
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.engine_service.config import HASH_TOY
from kvkeeper.engine_service.ranks import rank_model
from kvkeeper.engine_service.ranks.messages import Answer, Kind, Pipe, PipeEnded, SumFailed, decode_fault
from kvkeeper.engine_service.ranks.rank_process import PARTED, RankProcess, obey_all
from tests.support.stand_ins.device_faults import accelerator_error, out_of_memory

ATTACHMENT = {"path": "", "token": "", "arena_bytes": 0, "host_arena_bytes": 0}
Heard = list[tuple[int, bytearray]]


def obey(*kinds: Kind, model: str = HASH_TOY, device: str = "cpu") -> tuple[int, Heard]:
    """The exit code of a rank that is told these, and what it says."""
    config = {"model": model, "device": device, "log_level": "info"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        first = Pipe(ours)
        for kind in kinds:
            first.send(kind, json.dumps(ATTACHMENT).encode())
        ours.shutdown(socket.SHUT_WR)
        code = obey_all(Pipe(theirs), {"config": config, "rank": 1, "num_ranks": 2, "timeout_s": 5.0})
        theirs.close()
        return code, all_of(first)


def all_of(pipe: Pipe) -> Heard:
    heard: Heard = []
    try:
        while True:
            heard.append(pipe.receive())
    except PipeEnded:
        return heard


def fail_at(monkeypatch: pytest.MonkeyPatch, at: Kind, error: BaseException) -> None:
    def fail(*parts: object) -> None:
        raise error

    def obey_one(rank: RankProcess, kind: int, body: bytearray) -> None:
        if kind == at:
            raise error

    if at == Kind.SET_UP:
        monkeypatch.setattr(rank_model, "load_rank_model", fail)
    monkeypatch.setattr(RankProcess, "obey", obey_one)


@pytest.mark.parametrize("at", list(Kind))
@pytest.mark.parametrize(("number", "name"), [(2, "cudaErrorMemoryAllocation"), (700, "cudaErrorIllegalAddress")])
def test_an_error_of_the_device_is_told_the_first_rank_in_words(
    monkeypatch: pytest.MonkeyPatch, at: Kind, number: int, name: str
) -> None:
    in_steps = at in (Kind.TRANSFERS, Kind.COPIES, Kind.FORWARD, Kind.REPLAY, Kind.SYNCHRONIZE)
    fail_at(monkeypatch, at, accelerator_error(number, ""))
    with capture_logs() as logs:
        code, heard = obey(*(() if at == Kind.SET_UP else (at,)))
    assert code == 1
    kind, body = heard[-1]
    assert kind == (Answer.FAILED if in_steps and number == 2 else Answer.LOST)
    assert decode_fault(body) == (name, "", "cpu")
    assert [answer for answer, _ in heard[:-1]] == ([] if at == Kind.SET_UP else [Answer.DONE]), "that it is set up"
    assert logs == [], "the first rank tells it"


def test_the_sizes_of_a_shortage_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, Kind.SET_UP, out_of_memory())
    _, [(_, body)] = obey()
    assert decode_fault(body) == ("cudaErrorMemoryAllocation", "2.50 GiB were asked for, 640.50 MiB are free", "cpu")


@pytest.mark.parametrize(("count", "name"), [(0, "cudaErrorNoDevice"), (1, "cudaErrorInvalidDevice")])
def test_a_device_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, count: int, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    code, [(kind, body)] = obey(model="/no/such/folder", device="cuda:1")
    assert (code, kind) == (1, Answer.LOST)
    assert decode_fault(body) == (name, "", "cuda:1")


def test_a_bug_is_told_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, Kind.FORWARD, ValueError("a bug"))
    with capture_logs() as logs:
        code, heard = obey(Kind.FORWARD)
    (told,) = logs
    assert told["event"] == "rank_failed"
    assert told["exc_info"]
    assert (code, [kind for kind, _ in heard]) == (1, [Answer.DONE])


def test_a_rank_that_parts_from_another_says_nothing_but_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, Kind.FORWARD, SumFailed("another has ended"))
    code, heard = obey(Kind.FORWARD)
    assert (code, [kind for kind, _ in heard]) == (PARTED, [Answer.DONE])


def test_a_rank_that_is_wanted_no_more_ends_well() -> None:
    assert obey()[0] == 0


@pytest.mark.parametrize(
    ("name", "answer"), [("CUDA_ERROR_ECC_UNCORRECTABLE", Answer.LOST), ("CUDA_ERROR_MAP_FAILED", Answer.REFUSED)]
)
def test_memory_that_cannot_be_mapped_is_a_refusal_but_on_a_lost_device(
    monkeypatch: pytest.MonkeyPatch, name: str, answer: Answer
) -> None:
    def attach(*parts: Any, **more: Any) -> None:
        try:
            raise CudaError("cuMemMap", name)
        except CudaError as error:
            raise KvkeeperError(StatusCode.FAILED_PRECONDITION, message=f"it cannot be mapped: {error}") from None

    monkeypatch.setattr(arena, "attach_arena", attach)
    _, heard = obey(Kind.ATTACH)
    assert [kind for kind, _ in heard] == [Answer.DONE, answer]
