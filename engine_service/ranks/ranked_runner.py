"""RankedRunner: the model on all ranks, as one Runner.

The engine's loop and its worker thread meet it as they meet a model on one rank. Each call goes to the other ranks first, which
then compute beside this one; what they add up meets in the model's layers. A forward pass or synchronize returns when all ranks
have replied: so what a step has copied, moved and written is done on all of them.
"""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from kvkeeper.client.steps import StepResult
from kvkeeper.kernels.attention.flashinfer_prefill import FlashInfer

from ..compute.device.device_errors import ReportedFault, find_fault
from ..compute.device.device_queue import DeviceQueue, HostQueue, WaitedQueue
from ..compute.device.token_counts import TokenCounts
from ..compute.graphs.graph_api import GraphApi
from ..compute.model_runner import AnyLayout, ModelRunner, Runner, StepBounds
from ..values.batch import Batch
from .messages import Kind, RankLost, SumFailed, decode_ids, encode_batch
from .ranks import Ranks


class RankedRunner:
    """A Runner on the first rank's arena, and on those of the others."""

    def __init__(self, own: Runner, ranks: Ranks) -> None:
        """own: the first rank's part. The other ranks have the session's memory mapped."""
        self._own, self._ranks = own, ranks
        self._failed: list[int] = []
        # One thread talks with the ranks: it reads a step, and hears of a failure, before it launches the next one.
        self.queue: DeviceQueue = WaitedQueue(own.queue) if isinstance(own, ModelRunner) else HostQueue()

    @property
    def vocab_size(self) -> int:
        return self._own.vocab_size

    @property
    def layout(self) -> AnyLayout:
        return self._own.layout

    @property
    def counts(self) -> TokenCounts | None:
        """The counts of the first rank, which draws."""
        return self._own.counts if isinstance(self._own, ModelRunner) else None

    def make_ready(
        self,
        bounds: StepBounds,
        graphs: GraphApi | None,
        *,
        with_retention: bool,
        progress: bool,
        flashinfer: FlashInfer | None = None,
    ) -> None:
        """See ModelRunner; without graphs, which all ranks would have to capture at once. Raises RankLost, ReportedFault."""
        assert isinstance(self._own, ModelRunner) and graphs is None
        wants = flashinfer is not None and flashinfer.package is not None
        fields = {"bounds": dataclasses.asdict(bounds), "with_retention": with_retention, "flashinfer": wants}
        self._ranks.send_all(Kind.MAKE_READY, json.dumps(fields).encode())
        try:
            self._own.make_ready(bounds, None, with_retention=with_retention, progress=progress, flashinfer=flashinfer)
        except SumFailed as error:
            raise self._sum_failed(error) from None
        except BaseException:
            self._ranks.stop()  # they are in the middle of a step, and would wait for this rank
            raise
        self._ranks.hear()

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ModelRunner. Raises RankLost, ReportedFault."""
        self._ranks.send_all(Kind.FORWARD, encode_batch(batch))
        try:
            logits = self._own.forward(batch)
        except SumFailed as error:
            raise self._sum_failed(error) from None
        except Exception as error:  # the others are in the middle of the step, and this rank has left it
            fault = find_fault(error)
            why = str(error) if fault is None else fault.text()
            raise self._ranks.lose(f"the first rank could not compute a step: {why}", is_ours=True) from error
        self._hear()
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ModelRunner. Raises RankLost, ReportedFault."""
        if len(pairs):
            self._ranks.send_all(Kind.COPIES, np.array(pairs, "<i8").tobytes())
        self._own.copy_blocks(pairs)
        if len(pairs):
            self.synchronize()  # a step without a batch counts as done when this returns

    def synchronize(self) -> None:
        """Wait until the devices of all ranks have done all the work they were given; of this one, where others are lost.

        That is noticed before a result is used, as a lost lease is.
        """
        self._own.synchronize()
        with suppress(RankLost, ReportedFault):
            self._ranks.send_all(Kind.SYNCHRONIZE)
            self._hear()

    def run_transfers(self, answer: StepResult) -> None:
        """Have the other ranks run a step's transfer orders, before its copies. Where one is lost, its forward pass says so."""
        columns = (answer.transfer_ids, answer.transfer_kinds, answer.transfer_sources, answer.transfer_destinations)
        with suppress(RankLost, ReportedFault):
            self._ranks.send_all(Kind.TRANSFERS, np.array(columns, "<i8").tobytes())

    def take_failed(self) -> list[int]:
        """Ids of the orders that failed on another rank in the steps that were computed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def _sum_failed(self, error: SumFailed) -> RankLost | ReportedFault:
        return self._ranks.lose(f"a sum over the ranks failed: {error}", is_ours=False)

    def _hear(self) -> None:
        for body in self._ranks.hear():
            self._failed += decode_ids(body)
