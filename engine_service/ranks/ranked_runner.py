"""RankedRunner: the model on all ranks, as one Runner.

The engine's loop and its worker thread meet it as they meet a model on one rank. Each call goes to the other ranks first, which
then compute beside this one; what they add up meets in the model's layers. A forward pass returns when all ranks have replied,
those on devices once they have launched it. The last thing that ranks do together in a step is behind all that it copies, moves
and writes. So what is done on this rank's device is done on all of them. A step may be launched before the tokens of the one
before are read: the first rank has them on its device, and shares them from there.
"""

import dataclasses
import json
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from kvkeeper.client.steps import StepResult
from kvkeeper.kernels.attention.flashinfer_prefill import FlashInfer

from ..compute.device.device_errors import ReportedFault, find_fault
from ..compute.device.device_queue import DeviceQueue, HostQueue
from ..compute.device.token_counts import Counted, LastTokens, TokenCounts
from ..compute.device.upload import Staged
from ..compute.graphs.graph_api import GraphApi
from ..compute.model_runner import AnyLayout, ModelRunner, Runner, StepBounds
from ..compute.sampler import StepLogits
from ..values.batch import Batch
from ..values.sampling_params import SampledRows
from .messages import Kind, RankLost, SumFailed, decode_ids, encode_batch
from .ranks import Ranks


class RankedRunner:
    """A Runner on the first rank's arena, and on those of the others."""

    def __init__(self, own: Runner, ranks: Ranks) -> None:
        """own: the first rank's part. The other ranks have the session's memory mapped."""
        self._own, self._ranks = own, ranks
        self._failed: set[int] = set()
        self._talking = threading.Lock()  # of the thread that launches, and of that which reads a step that failed
        self.queue: DeviceQueue = own.queue if isinstance(own, ModelRunner) else HostQueue()
        self._has_orders = False  # of copies or transfers, which no reply came behind
        self._known_tokens = LastTokens()  # of a model that takes them from the host

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

    @property
    def last_tokens(self) -> LastTokens:
        """Those that the first rank drew."""
        return self._own.last_tokens if isinstance(self._own, ModelRunner) else self._known_tokens

    def make_ready(
        self,
        bounds: StepBounds,
        graphs: GraphApi | None,
        *,
        with_retention: bool,
        progress: bool,
        flashinfer: FlashInfer | None = None,
    ) -> None:
        """See ModelRunner. All ranks run and capture the same, at once. Raises RankLost, ReportedFault."""
        own = self._own
        assert isinstance(own, ModelRunner)
        wants = flashinfer is not None and flashinfer.package is not None
        fields = {"bounds": dataclasses.asdict(bounds), "with_retention": with_retention, "flashinfer": wants}
        warm_up = partial(own.make_ready, bounds, None, with_retention=with_retention, progress=progress, flashinfer=flashinfer)
        self._do_with_others(Kind.MAKE_READY, fields, warm_up)
        if graphs is not None and (shape := own.find_shape(bounds)) is not None:
            fields = {"bounds": dataclasses.asdict(bounds), "shape": dataclasses.asdict(shape)}
            self._do_with_others(Kind.CAPTURE, fields, partial(own.capture, shape, bounds, graphs, progress=progress))

    def _do_with_others(self, kind: Kind, fields: dict[str, Any], own: Callable[[], None]) -> None:
        self._ranks.send_all(kind, json.dumps(fields).encode())
        try:
            own()
        except SumFailed as error:
            raise self._sum_failed(error) from None
        except BaseException:
            self._ranks.stop()  # they are in the middle of a step, and would wait for this rank
            raise
        self._ranks.hear()

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ModelRunner. Raises RankLost, ReportedFault."""
        return self.stage(batch)().values

    def stage(self, batch: Batch, rows: SampledRows = (), counted: Counted | None = None) -> Staged[StepLogits]:
        """See ModelRunner. What it returns raises RankLost, ReportedFault."""
        own = self._own
        if not isinstance(own, ModelRunner):
            return Staged(lambda: self._compute_known(self._known_tokens.known(batch)))
        body, kind, staged = encode_batch(batch), Kind.REPLAY, own.stage_replay(batch, rows, counted)
        if staged is None:
            kind, staged = Kind.FORWARD, own.stage_plain(batch)
        return Staged(partial(self._compute, kind, body, staged), staged.give_back)

    def _compute_known(self, batch: Batch) -> StepLogits:
        return self._compute(Kind.FORWARD, encode_batch(batch), lambda: StepLogits(self._own.forward(batch)))

    def _compute(self, kind: Kind, body: bytes, own: Callable[[], StepLogits]) -> StepLogits:
        """own: computes the first rank's part."""
        with self._talking:
            self._ranks.send_all(kind, body)
            try:
                found = own()
            except SumFailed as error:
                raise self._sum_failed(error) from None
            except Exception as error:  # the others are in the middle of the step, and this rank has left it
                fault = find_fault(error)
                why = str(error) if fault is None else fault.text()
                raise self._ranks.lose(f"the first rank could not compute a step: {why}", is_ours=True) from error
            self._hear()
        return found

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ModelRunner. Raises RankLost, ReportedFault."""
        if len(pairs):
            with self._talking:
                self._has_orders = True
                self._ranks.send_all(Kind.COPIES, np.array(pairs, "<i8").tobytes())
        self._own.copy_blocks(pairs)

    def end_without_batch(self) -> None:
        """The step has nothing that ranks do together. So its copies and transfers are done when this returns."""
        if self._has_orders:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until the devices of all ranks have done all the work they were given; of this one, where others are lost.

        That is noticed before a result is used, as a lost lease is.
        """
        self._own.synchronize()
        with self._talking, suppress(RankLost, ReportedFault):
            self._ranks.send_all(Kind.SYNCHRONIZE)
            self._hear()

    def run_transfers(self, answer: StepResult) -> None:
        """Have the other ranks run a step's transfer orders, before its copies. Where one is lost, its forward pass says so."""
        columns = (answer.transfer_ids, answer.transfer_kinds, answer.transfer_sources, answer.transfer_destinations)
        with self._talking, suppress(RankLost, ReportedFault):
            self._has_orders = True
            self._ranks.send_all(Kind.TRANSFERS, np.array(columns, "<i8").tobytes())

    def take_failed(self, order_ids: Collection[int]) -> set[int]:
        """Which of these orders, of a step that was computed, have failed on another rank. They are forgotten here."""
        failed = self._failed.intersection(order_ids)
        self._failed.difference_update(failed)
        return failed

    def _sum_failed(self, error: SumFailed) -> RankLost | ReportedFault:
        return self._ranks.lose(f"a sum over the ranks failed: {error}", is_ours=False)

    def _hear(self) -> None:
        self._has_orders = False
        for body in self._ranks.hear():
            self._failed.update(decode_ids(body))
