"""GraphedDecode: steps that only decode, as graphs of a decoder on one arena.

A graph holds addresses of the arena and of its own memory. So it belongs to one mapping: an engine that maps another arena
makes a new runner, which captures anew. A batch that no graph was captured for is computed plainly. Each graph begins with the
tokens that the step before drew, and ends with the likeliest of each row, which it leaves for the step behind. A second
graph of each size draws from the logits of the first, each row by its own parameters, seed and position, and leaves those
tokens instead. The logits of all sizes lie in one place: apart, those of forty sizes of a large vocabulary are gigabytes.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from kvkeeper.kernels.scratch import Scratch

from ...values.batch import Batch
from ...values.sampling_params import SampledRows, as_plain
from ..device.device_queue import DeviceQueue
from ..device.last_tokens import LastTokens
from ..device.upload import Staged
from ..sampler import draw_plain
from ..step_logits import StepLogits, with_likeliest
from .decode_inputs import DecodeInputs
from .graph_api import Graph, GraphApi
from .sizes import graph_sizes, size_for

# (tensors by name, scratch, where logits go) -> logits; reads the values of the tensors on the device alone
PlainDecode = Callable[[Mapping[str, torch.Tensor], Scratch, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The largest step that is captured: rows, blocks of a row's table, and positions that the model has tables for.

    num_groups: of layers, each with tables of its own.
    """

    most_rows: int
    table_width: int
    num_positions: int
    vocab_size: int
    num_groups: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class SizeGraphs:
    """Of one batch size, each with what it leaves: the decode with the likeliest tokens, and the draw from its logits."""

    decode: tuple[Graph, StepLogits]
    draw: tuple[Graph, StepLogits]


class GraphedDecode:
    """Captured graphs by batch size. Only one thread computes."""

    def __init__(self, shape: DecodeShape, inputs: DecodeInputs, graphs: Mapping[int, SizeGraphs]) -> None:
        self._shape, self._inputs, self._graphs = shape, inputs, graphs
        self._sizes = sorted(graphs)
        self.num_replays = self.num_draws = 0

    def stage(self, batch: Batch, rows: SampledRows = ()) -> Staged[StepLogits] | None:
        """A call that computes the batch; None: no graph fits, nothing was done.

        rows: how the batch's rows are drawn, in their order. They are drawn at once where as_plain knows how. (): nobody says.

        Its logits, float32 [S, vocab_size], and what is beside them are valid until the next one is made.
        """
        count, width = batch.block_tables.shape
        size = size_for(count, self._sizes)
        if size is None or width > self._shape.table_width or not _only_decodes(batch):
            return None
        if int(batch.positions.max()) >= self._shape.num_positions:
            return None
        if self._shape.num_groups > 1 and batch.group_tables is None:
            return None
        draws = as_plain(rows) if len(rows) == count else None
        inputs = self._inputs.stage(batch, size, draws)
        return Staged(partial(self._replay, inputs, size, count, draws=draws is not None), inputs.give_back)

    def _replay(self, copy: Callable[[], None], size: int, count: int, *, draws: bool) -> StepLogits:
        graph, made = self._graphs[size].decode
        copy()
        graph.replay()
        self.num_replays += 1
        if draws:
            graph, made = self._graphs[size].draw
            graph.replay()
            self.num_draws += 1
        return made if size == count else made.first(count)


def capture_decode(
    decode: PlainDecode,
    shape: DecodeShape,
    device: torch.device,
    api: GraphApi,
    queue: DeviceQueue,
    last: LastTokens,
    *,
    progress: bool,
) -> GraphedDecode:
    """Capture every size, the largest first: the smaller ones fit its memory.

    queue: in whose order the graphs are replayed.
    last: of as many rows as there are sequences, and one more for padding; its memory stays where it is.
    progress: show a bar on stderr.
    """
    inputs = DecodeInputs(
        shape.most_rows,
        shape.table_width,
        device,
        queue,
        padding_row=len(last.tensor) - 1,
        pin_memory=device.type == "cuda",
        num_groups=shape.num_groups,
    )
    sizes = graph_sizes(shape.most_rows)
    scratch = Scratch(device)  # of the graphs alone: it must not move once the first one is captured
    logits = torch.zeros((shape.most_rows, shape.vocab_size), device=device)
    graphs = {}
    for size in tqdm(reversed(sizes), "capturing", len(sizes), unit="graph", file=sys.stderr, disable=not progress):
        tensors = inputs.tensors(size)
        decoded = api.capture(partial(_decode_and_choose, decode, tensors, scratch, logits[:size], last))
        drawn = api.capture(partial(_draw, decoded[1], inputs.drawing(size), tensors["rows"], last))
        graphs[size] = SizeGraphs(decoded, drawn)
    return GraphedDecode(shape, inputs, graphs)


def _decode_and_choose(
    decode: PlainDecode, tensors: Mapping[str, torch.Tensor], scratch: Scratch, logits: torch.Tensor, last: LastTokens
) -> StepLogits:
    token_ids = last.filled_there(tensors["token_ids"], tensors["awaited_rows"])
    made = with_likeliest(decode({**tensors, "token_ids": token_ids}, scratch, logits))
    assert made.likeliest is not None
    last.tensor.index_copy_(0, tensors["rows"], made.likeliest)
    return made


def _draw(made: StepLogits, drawing: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, last: LastTokens) -> StepLogits:
    step = draw_plain(made, *drawing)
    assert step.drawn is not None
    last.tensor.index_copy_(0, rows, step.drawn)
    return step


def _only_decodes(batch: Batch) -> bool:
    """Each row has one token, whose logits are wanted, and sees all of its keys."""
    count = len(batch.seq_lens)
    if batch.retention is not None or len(batch.token_ids) != count:
        return False
    return len(batch.logit_rows) == count and np.array_equal(batch.logit_rows, np.arange(count))
