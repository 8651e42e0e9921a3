"""GraphedDecode: steps that only decode, as graphs of a decoder on one arena.

A graph holds addresses of the arena and of its own memory. So it belongs to one mapping: an engine that maps another arena
makes a new runner, which captures anew. A batch that no graph was captured for is computed plainly. Each graph begins with the
tokens that the step before drew, and ends with the likeliest of each row, which it leaves for the step behind. A second
graph of each size draws from the logits of the first, each row by its own parameters, seed and position, and leaves those
tokens instead; a third one penalises the logits before, by counts that stay on the device. The logits of all sizes lie in one
place: apart, those of forty sizes of a large vocabulary are gigabytes.

A graph keeps no memory but what its capture made. All else that it reads is held by GraphReads, or by the runner that holds the
GraphedDecode: docs/operate/gpu.md has the list.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from kvkeeper.kernels.penalise_counted import penalise_counted
from kvkeeper.kernels.scratch import Scratch

from ...values.batch import Batch
from ...values.sampling_params import PlainDraws, SampledRows, as_plain
from ..device.device_queue import DeviceQueue
from ..device.token_counts import Counted, LastTokens, TokenCounts
from ..device.upload import Staged
from ..sampler import StepLogits, draw_penalised, draw_plain, with_likeliest
from .decode_inputs import DecodeInputs
from .graph_api import Graph, GraphApi, graph_sizes, size_for

# (tensors by name, scratch, where logits go) -> logits; reads the values of the tensors on the device alone
PlainDecode = Callable[[Mapping[str, torch.Tensor], Scratch, torch.Tensor], torch.Tensor]

Captured = tuple[Graph, StepLogits]  # with what its replay leaves


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
    """The graphs of one batch size, each with what it leaves: the decode with the likeliest tokens, and draws from its logits.

    penalise: draws from them less penalties.
    token_ids: what the decode computed, which penalise reads.
    """

    token_ids: torch.Tensor
    decode: Captured
    draw: Captured
    penalise: Captured


@dataclass(frozen=True, slots=True, eq=False)
class GraphReads:
    """What graphs read at addresses that were there before their capture, and that no graph keeps.

    scratch: of the graphs alone. logits: float32 [most_rows, vocab_size], which all sizes write.
    """

    inputs: DecodeInputs
    scratch: Scratch
    logits: torch.Tensor
    last: LastTokens
    counts: TokenCounts


class GraphedDecode:
    """Captured graphs by batch size, and what they read. Only one thread computes."""

    def __init__(self, shape: DecodeShape, reads: GraphReads, graphs: Mapping[int, SizeGraphs]) -> None:
        self._shape, self._reads, self._graphs = shape, reads, graphs
        self._sizes = sorted(graphs)
        self.num_replays = self.num_draws = self.num_penalised = 0

    def stage(self, batch: Batch, rows: SampledRows = (), counted: Counted | None = None) -> Staged[StepLogits] | None:
        """A call that computes the batch; None: no graph fits, nothing was done.

        rows: how the batch's rows are drawn, in their order. They are drawn at once where as_plain knows how, or where nothing
        but penalties is in its way. (): not given.
        counted: of the rows that are penalised.

        Its logits, float32 [S, vocab_size], and what is beside them are valid until the next one is made.
        """
        count, width = batch.block_tables.shape
        size = size_for(count, self._sizes)
        if size is None or width > self._shape.table_width or not batch.only_decodes:
            return None
        if int(batch.positions.max()) >= self._shape.num_positions:
            return None
        if self._shape.num_groups > 1 and batch.group_tables is None:
            return None
        draws = None
        if len(rows) == count:
            draws = rows if counted is not None and isinstance(rows, PlainDraws) else as_plain(rows)
        inputs = self._reads.inputs.stage(batch, size, draws, None if counted is None else counted.rows)
        graphs = self._graphs[size]
        draw = None if draws is None else graphs.draw if counted is None else graphs.penalise
        replay = partial(self._replay, inputs, graphs.decode, draw, None if draws is None else counted, count)
        return Staged(replay, inputs.give_back)

    def _replay(
        self, copy: Callable[[], None], decode: Captured, draw: Captured | None, counted: Counted | None, count: int
    ) -> StepLogits:
        graph, made = decode
        copy()
        graph.replay()
        self.num_replays += 1
        if counted is not None:
            counted.bring()
            self.num_penalised += 1
        if draw is not None:
            graph, made = draw
            graph.replay()
            self.num_draws += 1
        return made if len(made.values) == count else made.first(count)


def capture_decode(
    decode: PlainDecode,
    shape: DecodeShape,
    device: torch.device,
    api: GraphApi,
    queue: DeviceQueue,
    last: LastTokens,
    counts: TokenCounts,
    *,
    progress: bool,
) -> GraphedDecode:
    """Capture every size, the largest first: the smaller ones fit its memory.

    queue: the graphs are replayed in its order.
    last: of as many rows as there are sequences, and one more for padding; its memory stays where it is.
    counts: of as many rows as a step has.
    progress: show a bar on stderr.
    """
    inputs = DecodeInputs(
        shape.most_rows,
        shape.table_width,
        device,
        queue,
        padding_row=len(last.tensor) - 1,
        padding_slot=counts.padding_slot,
        pin_memory=device.type == "cuda",
        num_groups=shape.num_groups,
    )
    sizes = graph_sizes(shape.most_rows)
    logits = torch.zeros((shape.most_rows, shape.vocab_size), device=device)
    reads = GraphReads(inputs, Scratch(device), logits, last, counts)
    graphs = {}
    for size in tqdm(reversed(sizes), "capturing", len(sizes), unit="graph", file=sys.stderr, disable=not progress):
        tensors = inputs.tensors(size)
        graph, (made, token_ids) = api.capture(partial(_decode_and_choose, decode, tensors, reads.scratch, logits[:size], last))
        reads.scratch.fix()
        draw = partial(_draw, made, inputs.drawing(size), tensors["rows"], last)
        penalise = partial(penalise_counted, made.values, counts.tensor, inputs.counting(token_ids))
        graphs[size] = SizeGraphs(token_ids, (graph, made), api.capture(draw), api.capture(partial(draw, penalise)))
    return GraphedDecode(shape, reads, graphs)


def _decode_and_choose(
    decode: PlainDecode, tensors: Mapping[str, torch.Tensor], scratch: Scratch, logits: torch.Tensor, last: LastTokens
) -> tuple[StepLogits, torch.Tensor]:
    """What is made, and the tokens that it is made of."""
    token_ids = last.filled_there(tensors["token_ids"], tensors["awaited_rows"])
    made = with_likeliest(decode({**tensors, "token_ids": token_ids}, scratch, logits))
    assert made.likeliest is not None
    last.tensor.index_copy_(0, tensors["rows"], made.likeliest)
    return made, token_ids


def _draw(
    made: StepLogits,
    drawing: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    last: LastTokens,
    penalise: Callable[[], torch.Tensor] | None = None,
) -> StepLogits:
    """penalise: gives the logits to draw from; None: those that were made."""
    step = draw_plain(made, *drawing) if penalise is None else draw_penalised(made, penalise(), *drawing)
    assert step.drawn is not None
    last.tensor.index_copy_(0, rows, step.drawn)
    return step
