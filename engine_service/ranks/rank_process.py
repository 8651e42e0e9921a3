"""A process that is one rank of an engine, but not the first: it obeys the first rank, and ends with it.

`python -m kvkeeper.engine_service.ranks.rank_process DESCRIPTOR PARENT FOLDER`, started by the engine alone. Messages come on
the socket of the descriptor. A thread watches the engine by its pidfd, so that this process ends also while it computes or
waits for others; it then removes the folder in which the ranks met. Whatever fails here ends the process. Where its device
fails, it says so on the socket first: of a lost device the engine ends, and of anything else it starts all ranks again.
"""

import ctypes
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from kvkeeper.common.service import log as service_log
from kvkeeper.common.service import output

from .messages import IN_STEPS, Answer, Kind, Pipe, PipeEnded, SumFailed, decode_batch, encode_fault, encode_ids

if TYPE_CHECKING:
    from kvkeeper.client.arena import Arena

    from ..compute.model_runner import Runner
    from .block_copies import BlockMover

log = structlog.get_logger()

PARTED = 70  # exit code of a rank that cannot go on because another one is lost
_PR_SET_NAME = 15
_Failed = list[int]  # ids of transfer orders of the step that is computed


@dataclass(slots=True)
class _Mapped:
    """A session's memory, and the model on it."""

    arena: "Arena"
    runner: "Runner"
    mover: "BlockMover"


class RankProcess:
    """Obeys messages, one after another."""

    def __init__(self, pipe: Pipe, set_up: dict[str, Any]) -> None:
        """Loads the rank's part of the model, which takes as long as that takes. Raises ModelError, CudaError."""
        import torch  # takes seconds; the process that starts this one knows of it by then

        from ..compute.cpu_kernels import switch_kernels
        from ..config import EngineConfig
        from ..model.split import Split
        from .meeting import Meeting
        from .rank_model import load_rank_model

        config = EngineConfig(**set_up["config"], progress=False)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._pipe, self._rank, self._num_ranks = pipe, set_up["rank"], set_up["num_ranks"]
        self._timeout_s: float = set_up["timeout_s"]
        self._device = torch.device(config.device)
        if self._device.type == "cuda":
            _require_device(self._device.index or 0, torch.cuda.device_count())
        self._meeting = Meeting(self._num_ranks)
        switch_kernels(config)
        self._on_arena = load_rank_model(config, Split(self._rank, self._num_ranks, self._meeting))
        self._mapped: _Mapped | None = None
        self._failed: _Failed = []

    def obey(self, kind: int, body: bytearray) -> None:
        """Do what one message asks for."""
        if kind == Kind.JOIN:
            self._meeting.join(Path(json.loads(body)["path"]), self._rank, self._device, self._timeout_s)
            self._pipe.send(Answer.DONE)
        elif kind == Kind.ATTACH:
            self._attach(json.loads(body))
        elif kind == Kind.DETACH:
            self._detach()
            self._pipe.send(Answer.DONE)
        else:
            assert self._mapped is not None, "steps come on memory"
            self._step(kind, body, self._mapped)

    def _step(self, kind: int, body: bytearray, mapped: _Mapped) -> None:
        import numpy as np

        from kvkeeper.kernels.attention.flashinfer_prefill import find_flashinfer

        from ..compute.graphs.graph_api import CudaGraphs
        from ..compute.graphs.graphed_steps import StepShape
        from ..compute.model_runner import ModelRunner, StepBounds

        if kind == Kind.TRANSFERS:
            orders = zip(*np.frombuffer(body, "<i8").reshape(4, -1).tolist(), strict=True)
            self._failed += mapped.mover.move(orders)[1]
        elif kind == Kind.COPIES:
            mapped.runner.copy_blocks([(source, to) for source, to in np.frombuffer(body, "<i8").reshape(-1, 2).tolist()])
        elif kind == Kind.MAKE_READY:
            fields = json.loads(body)
            assert isinstance(mapped.runner, ModelRunner), "of a device"
            mapped.mover.make_ready()
            found = find_flashinfer(wanted=True) if fields["flashinfer"] else None
            bounds, retains = StepBounds(**fields["bounds"]), fields["with_retention"]
            mapped.runner.make_ready(bounds, None, with_retention=retains, progress=False, flashinfer=found)
            self._pipe.send(Answer.DONE)
        elif kind == Kind.CAPTURE:
            fields = json.loads(body)
            assert isinstance(mapped.runner, ModelRunner), "of a device"
            shape = StepShape(**fields["shape"] | {"state_groups": tuple(fields["shape"]["state_groups"])})
            mapped.runner.capture(shape, StepBounds(**fields["bounds"]), CudaGraphs(self._device), progress=False)
            self._pipe.send(Answer.DONE)
        else:
            if kind == Kind.REPLAY:
                assert isinstance(mapped.runner, ModelRunner), "it was captured"
                staged = mapped.runner.stage_replay(decode_batch(body))
                assert staged is not None, "all ranks have captured the same"
                staged()
            elif kind == Kind.FORWARD:
                runner, batch = mapped.runner, decode_batch(body)
                runner.stage_plain(batch)() if isinstance(runner, ModelRunner) else runner.forward(batch)
            else:
                assert kind == Kind.SYNCHRONIZE
                mapped.runner.synchronize()
            failed, self._failed = self._failed, []
            self._pipe.send(Answer.DONE, encode_ids(failed))

    def _attach(self, fields: dict[str, Any]) -> None:
        from kvkeeper.client.arena import attach_arena
        from kvkeeper.client.errors import KvkeeperError

        from ..compute.device.device_errors import lost_by
        from ..model.checkpoint.errors import ModelError
        from .block_copies import BlockMover, copies_for
        from .mapped_arena import arena_tensor, host_blocks, packing_from

        sizes = fields["arena_bytes"], self._timeout_s, fields["host_arena_bytes"]
        try:
            arena = attach_arena(fields["path"], fields["token"], *sizes, rank=self._rank)
        except KvkeeperError as error:
            if lost_by(error) is not None:
                raise
            refusal = {"code": error.code.name, "reason": error.reason, "message": error.message}
            self._pipe.send(Answer.REFUSED, json.dumps(refusal).encode())
            return
        arena.pin_hosts()
        memory = arena_tensor(arena)
        hosts = host_blocks(arena, fields["host_block_bytes"], self._rank, self._num_ranks)
        copies = copies_for(packing_from(fields["packing"]), memory.device, hosts)
        runner, block_bytes = self._on_arena(memory, fields["block_size"], fields["has_groups"]), fields["block_bytes"]
        if runner.layout.block_bytes != block_bytes:
            raise ModelError(f"blocks of this rank have {runner.layout.block_bytes} bytes, those of the pool {block_bytes}")
        self._mapped = _Mapped(arena, runner, BlockMover(memory.view(-1, block_bytes), hosts, copies))
        self._pipe.send(Answer.DONE)

    def _detach(self) -> None:
        """Raises BufferError where something still views the memory: the end of this process unmaps it then."""
        if self._mapped is None:
            return
        arena, self._mapped = self._mapped.arena, None
        self._failed = []
        gc.collect()
        arena.close()


def main() -> None:
    """Obey until the first rank closes the pipe."""
    descriptor, parent, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM):  # from a terminal or a supervisor: the engine still has requests to end
        signal.signal(number, signal.SIG_IGN)
    _watch(parent, folder)
    pipe = Pipe(socket.socket(fileno=descriptor))
    _, body = pipe.receive()
    set_up = json.loads(body)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"kvkeeper-rank{set_up['rank']}".encode()[:15], 0, 0, 0)
    with output.queued():
        service_log.configure(set_up["config"]["log_level"], "engine")
        code = obey_all(pipe, set_up)
    if not code:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stderr.flush()
    os._exit(code)  # whatever threads of libraries still do: the memory is unmapped by the end of the process


def obey_all(pipe: Pipe, set_up: dict[str, Any]) -> int:
    """Be the rank until the engine wants no more of it, or has ended, or the rank fails: the process's exit code."""
    kind = int(Kind.SET_UP)
    try:
        rank = RankProcess(pipe, set_up)
        pipe.send(Answer.DONE)
        while True:
            kind, body = pipe.receive()
            rank.obey(kind, body)
    except PipeEnded:
        return 0
    except SumFailed as error:
        log.warning("rank_parted", why=str(error))
        return PARTED
    except BaseException as error:
        _report_failed(error, pipe, kind, set_up)
        return 1


def _report_failed(error: BaseException, pipe: Pipe, kind: int, set_up: dict[str, Any]) -> None:
    """Report a fault of the device to the first rank, which logs it; log anything else.

    error: is being handled. kind: of the message that was obeyed.
    """
    from ..compute.device.device_errors import find_fault
    from ..model.checkpoint.errors import ModelError

    if (fault := find_fault(error)) is None:
        if isinstance(error, ModelError):
            log.error("rank_failed", message=str(error))
        else:
            log.exception("rank_failed")
        return
    is_lost = fault.is_sticky or kind not in IN_STEPS  # what is short at the start is short at the next one
    with suppress(PipeEnded):
        body = encode_fault(fault.name, fault.sizes, set_up["config"]["device"])
        pipe.send(Answer.LOST if is_lost else Answer.FAILED, body, set_up["timeout_s"])


def _require_device(index: int, count: int) -> None:
    """Raises CudaError where torch does not see the device among so many."""
    from kvkeeper.common.cuda.errors import CudaError

    if index >= count:
        raise CudaError("torch.cuda.device_count", "cudaErrorInvalidDevice" if count else "cudaErrorNoDevice")


def _watch(parent: int, folder: Path) -> None:
    """End this process when the engine's has ended."""
    try:
        engine = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:  # it ended before, and its number was used again
        os._exit(1)

    def wait() -> None:
        ended = select.poll()
        ended.register(engine, select.POLLIN)
        while not ended.poll():
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, name="engine", daemon=True).start()


if __name__ == "__main__":
    main()
