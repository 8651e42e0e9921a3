"""Models that misbehave on purpose, on top of the hash toy."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence

import numpy as np
import torch

from kvkeeper.engine_service.compute.model_runner import Runner
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.model.hash_toy import HashToyConfig, HashToyRunner
from kvkeeper.engine_service.model.split import WHOLE, Split
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.quantised.layout import QuantisedLayout
from tests.support.stand_ins.device_faults import accelerator_error, out_of_memory

NAN_TOKEN, CRASH_TOKEN, GATE_TOKEN = 500, 501, 502
OUT_OF_MEMORY_TOKEN, LOST_TOKEN = 503, 504


class OddRunner(HashToyRunner):
    """The toy, but for three tokens: NaN logits, an exception, and waiting until the gate is open."""

    def __init__(self, kv_view: torch.Tensor, layout: KvLayout, gate: threading.Event) -> None:
        super().__init__(HashToyConfig(), kv_view, layout)
        self._gate = gate

    def forward(self, batch: Batch) -> torch.Tensor:
        if (batch.token_ids == GATE_TOKEN).any():
            self._gate.wait(30)
        if (batch.token_ids == CRASH_TOKEN).any():
            raise ValueError("a bug in the model")
        logits = super().forward(batch)
        starts = batch.query_start_loc
        for row in range(len(batch.seq_lens)):
            if (batch.token_ids[starts[row] : starts[row + 1]] == NAN_TOKEN).any():
                logits[batch.logit_start_loc[row] : batch.logit_start_loc[row + 1]] = torch.nan
        return logits


def odd_model(gate: threading.Event | None = None) -> ServedModel:
    """The hash toy's ServedModel on an OddRunner. A gate that is not given is open."""
    if gate is None:
        gate = threading.Event()
        gate.set()
    toy = load_served_model(EngineConfig(model=HASH_TOY))
    return dataclasses.replace(toy, make_runner=lambda kv_view, layout: OddRunner(kv_view, layout, gate))


class FaultyRunner(HashToyRunner):
    """The toy on a device that fails where several tokens of a sequence are computed at once, and one of two is among them.

    A token that was drawn is computed alone, so that long outputs do no harm.
    """

    def forward(self, batch: Batch) -> torch.Tensor:
        query_lens = np.diff(batch.query_start_loc)
        in_prompts = batch.token_ids[np.repeat(query_lens > 1, query_lens)]
        if (in_prompts == OUT_OF_MEMORY_TOKEN).any():
            raise out_of_memory()
        if (in_prompts == LOST_TOKEN).any():
            raise accelerator_error(700)
        return super().forward(batch)


def faulty_model(split: Split = WHOLE) -> ServedModel:
    """The hash toy's ServedModel on a FaultyRunner."""
    toy = load_served_model(EngineConfig(model=HASH_TOY), split)
    return dataclasses.replace(toy, make_runner=lambda kv_view, layout: FaultyRunner(HashToyConfig(), kv_view, layout, split))


class LateGate:
    """Where a model's steps wait once a sequence has come to so many tokens. is_reached is set with the first that does."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.is_reached.wait, 20)


class LateGateRunner:
    """A runner behind a LateGate."""

    def __init__(self, runner: Runner, gate: LateGate) -> None:
        self._runner, self._gate = runner, gate

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def layout(self) -> KvLayout | QuantisedLayout:
        return self._runner.layout

    def forward(self, batch: Batch) -> torch.Tensor:
        if int(max(batch.seq_lens)) >= self._gate.num_tokens:
            self._gate.is_reached.set()
            self._gate.is_open.wait(30)
        return self._runner.forward(batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._runner.copy_blocks(pairs)

    def synchronize(self) -> None:
        self._runner.synchronize()


def late_gate_model(gate: LateGate, model: ServedModel | None = None) -> ServedModel:
    """A model, by default the hash toy, on a LateGateRunner."""
    served = model or load_served_model(EngineConfig(model=HASH_TOY))
    return dataclasses.replace(
        served, make_runner=lambda kv_view, layout: LateGateRunner(served.make_runner(kv_view, layout), gate)
    )
