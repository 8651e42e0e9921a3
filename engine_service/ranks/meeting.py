"""Meeting: what ranks do together, by torch.distributed: gloo on CPUs, NCCL on CUDA devices.

Owns where and how the ranks find each other: in a file of a private folder, and over the loopback interface. The store's values
are plain bytes, and only tensors go to and fro, so nothing is unpickled. The sum is the same to the last bit on all ranks,
because one of them adds each part up and hands it on; so what is computed alike on all ranks, such as the choice of experts,
comes out alike.

NCCL may be captured, all that it does here: a capture, and each replay of it, has to be one on all ranks. What goes from one
rank to another, as when logits are gathered, makes its connection the first time, and allocates memory for it. So a step is run
before it is captured, and other threads may call CUDA meanwhile (CudaGraphs). torch's watchdog looks at nothing that was begun
within a capture.

The groups are made by their own classes, not by init_process_group: a rank that was lost is replaced by making the whole group
anew, in a process that goes on.
"""

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..compute.device.device_errors import find_fault
from .messages import SumFailed

# By default torch's watchdog ends the process where a sum fails, comes late, or meets a lost device: a rank before it can
# report why, and the first one with its requests. So it may only break the sums off.
_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}


class Meeting:
    """Where the ranks come together, once they have joined. See Together of the model's split."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._rank = num_ranks, 0
        self._group: Any = None

    def join(self, path: Path, rank: int, device: torch.device, timeout_s: float) -> None:
        """Returns once all have joined at this path. timeout_s: of each sum, too.

        Raises RuntimeError where one stays away; where this rank's device fails, an error for which find_fault returns a fault.
        """
        self._rank, timeout = rank, timedelta(seconds=timeout_s)
        store = dist.FileStore(str(path), self._num_ranks)
        store.set_timeout(timeout)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            for variable, value in _WATCHDOG.items():
                os.environ.setdefault(variable, value)
            torch.cuda.set_device(device)
            self._group = dist.ProcessGroupNCCL(store, rank, self._num_ranks, options)
        else:
            gloo = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009  # a name that torch's stubs lack
            gloo._timeout = timeout
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._group = dist.ProcessGroupGloo(store, rank, self._num_ranks, gloo)
        self.add_up(torch.zeros(1, device=device))  # the first sum makes the connections

    def leave(self) -> None:
        """Forget the group. A sum that waits for a lost rank fails now, as far as the library can make it. From any thread."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, in the memory of this one.

        A step without logits adds up nothing behind its last K and V, but meets all the same: so a step that one rank has
        computed is one whose K and V all ranks have written.

        Raises SumFailed; where this rank's device fails, what it raises.
        """
        part = part.contiguous()
        self._run(lambda group: group.allreduce([part if part.numel() else part.new_zeros(1)]))
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """See Together. No rows are not gathered. Raises as add_up."""
        part, options = part.contiguous(), dist.GatherOptions()
        parts = part.new_empty((self._num_ranks, *part.shape)) if self._rank == 0 else None
        if part.numel():
            targets = [] if parts is None else [list(parts.unbind(0))]
            self._run(lambda group: group.gather(targets, [part], options))
        return parts

    def share(self, given: torch.Tensor) -> torch.Tensor:
        """See Together. In the memory of what it was given. Raises as add_up."""
        given = given.contiguous()
        self._run(lambda group: group.broadcast([given], dist.BroadcastOptions()))
        return given

    def _run(self, begin: Callable[[Any], Any]) -> None:
        group = self._group
        if group is None:
            raise SumFailed("the ranks have parted")
        try:
            begin(group).wait()
        except RuntimeError as error:
            if find_fault(error) is not None:
                raise
            raise SumFailed(str(error)) from None
