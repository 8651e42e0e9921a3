"""GraphedDecode: steps that only decode, as graphs of a decoder on one arena.

A graph holds addresses of the arena and of its own memory. So it belongs to one mapping: an engine that maps another arena
makes a new runner, which captures anew. A batch that no graph was captured for is computed plainly.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from kvkeeper.kernels.scratch import Scratch

from ...values.batch import Batch
from .decode_inputs import DecodeInputs
from .graph_api import Graph, GraphApi
from .sizes import graph_sizes, size_for

# (tensors by name, scratch) -> logits; reads the values of the tensors on the device alone
PlainDecode = Callable[[Mapping[str, torch.Tensor], Scratch], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The largest step that is captured: rows, blocks of a row's table, and positions that the model has tables for.

    num_groups: of layers, each with tables of its own.
    """

    most_rows: int
    table_width: int
    num_positions: int
    num_groups: int = 1


class GraphedDecode:
    """Captured graphs by batch size. Only one thread computes."""

    def __init__(self, shape: DecodeShape, inputs: DecodeInputs, graphs: Mapping[int, tuple[Graph, torch.Tensor]]) -> None:
        self._shape, self._inputs, self._graphs = shape, inputs, graphs
        self._sizes = sorted(graphs)
        self.num_replays = 0

    def forward(self, batch: Batch) -> torch.Tensor | None:
        """Logits of the batch, float32 [S, vocab_size], valid until the next call; None: no graph fits, nothing was done."""
        count, width = batch.block_tables.shape
        size = size_for(count, self._sizes)
        if size is None or width > self._shape.table_width or not _only_decodes(batch):
            return None
        if int(batch.positions.max()) >= self._shape.num_positions:
            return None
        if self._shape.num_groups > 1 and batch.group_tables is None:
            return None
        graph, logits = self._graphs[size]
        self._inputs.fill(batch, size)
        graph.replay()
        self.num_replays += 1
        return logits[:count]


def capture_decode(
    decode: PlainDecode, shape: DecodeShape, device: torch.device, api: GraphApi, *, progress: bool
) -> GraphedDecode:
    """Capture every size, the largest first: the smaller ones fit its memory.

    progress: show a bar on stderr.
    """
    is_pinned = device.type == "cuda"
    inputs = DecodeInputs(shape.most_rows, shape.table_width, device, pin_memory=is_pinned, num_groups=shape.num_groups)
    sizes = graph_sizes(shape.most_rows)
    scratch = Scratch(device)  # of the graphs alone: it must not move once the first one is captured
    graphs = {}
    for size in tqdm(reversed(sizes), "capturing", len(sizes), unit="graph", file=sys.stderr, disable=not progress):
        tensors = inputs.tensors(size)
        graphs[size] = api.capture(lambda tensors=tensors: decode(tensors, scratch))  # type: ignore[misc]
    return GraphedDecode(shape, inputs, graphs)


def _only_decodes(batch: Batch) -> bool:
    """Each row has one token, whose logits are wanted, and sees all of its keys."""
    count = len(batch.seq_lens)
    if batch.retention is not None or len(batch.token_ids) != count:
        return False
    return len(batch.logit_rows) == count and np.array_equal(batch.logit_rows, np.arange(count))
