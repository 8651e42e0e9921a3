"""GraphedSteps: steps of a decoder on one arena as graphs, those that only decode and those with prompts.

A graph holds addresses of the arena and of its own memory. So it belongs to one mapping: an engine that maps another arena
makes a new runner, which captures anew. A batch that no graph was captured for is computed plainly. Each graph begins with the
tokens that the step before drew, and ends with the likeliest of each row of logits, which it leaves for the step behind. The
logits of all steps lie in one place, because apart those of forty sizes of a large vocabulary are gigabytes. So a second graph,
by the number of rows alone, draws from them, each row by its own parameters, seed and position, and leaves those tokens
instead; a third one penalises the logits before, by counts that stay on the device.

Of several ranks each captures its part, all at once and in the same order. A graph begins with the tokens of the first rank,
which alone has logits, and draws.

A graph keeps no memory but what its capture made. All else that it reads is held by GraphReads, or by the runner that holds the
GraphedSteps: docs/operate/gpu.md has the list.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from kvkeeper.kernels.penalise_counted import penalise_counted
from kvkeeper.kernels.scratch import Scratch

from ...model.split import WHOLE, Split, Together
from ...values.batch import Batch
from ...values.sampling_params import PlainDraws, SampledRows, as_plain
from ..device.device_queue import DeviceQueue
from ..device.token_counts import Counted, LastTokens, TokenCounts
from ..device.upload import Staged
from ..sampler import StepLogits, draw_penalised, draw_plain, with_likeliest
from .graph_api import AgreedGraphs, Graph, GraphApi
from .step_inputs import InputsShape, StepInputs
from .step_sizes import StepSize, StepSizes, size_for

# (tensors by name, scratch, where logits go) -> logits; reads the values of the tensors on the device alone
PlainStep = Callable[[Mapping[str, torch.Tensor], Scratch, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step that is captured: rows, blocks of a row's table, and positions that the model has tables for.

    block_size: tokens of a block.
    most_prompt_tokens: of prompts beside the rows that decode; 0: steps with prompts are not captured.
    num_groups: of layers, each with tables of its own.
    state_groups: numbers of those groups that are recurrent, which are beside num_groups. Steps with prompts are not captured
    then.
    """

    most_rows: int
    table_width: int
    block_size: int
    num_positions: int
    vocab_size: int
    most_prompt_tokens: int = 0
    num_groups: int = 1
    state_groups: tuple[int, ...] = ()


Drawing = tuple[Graph, StepLogits]  # with what its replay leaves


@dataclass(frozen=True, slots=True, eq=False)
class Graphs:
    """All that were captured: steps by their size, and by the number of rows of logits those that draw from them.

    penalise: draws from them less penalties.
    """

    steps: Mapping[StepSize, Graph]
    draw: Mapping[int, Drawing]
    penalise: Mapping[int, Drawing]


@dataclass(frozen=True, slots=True, eq=False)
class GraphReads:
    """What graphs read at addresses that were there before their capture, and that no graph keeps.

    scratch: of the graphs alone.
    made: of most_rows rows, which all steps write; token_ids: int64 [most_rows], the tokens that these logits are of.
    counts: None on all ranks but the first, which have no logits.
    """

    inputs: StepInputs
    scratch: Scratch
    made: StepLogits
    token_ids: torch.Tensor
    last: LastTokens
    counts: TokenCounts | None
    together: Together


class GraphedSteps:
    """Captured graphs, and what they read. Only one thread computes."""

    def __init__(self, shape: StepShape, sizes: StepSizes, reads: GraphReads, graphs: Graphs) -> None:
        self._shape, self._sizes, self._reads, self._graphs = shape, sizes, reads, graphs
        self.num_replays = self.num_with_prompts = self.num_draws = self.num_penalised = 0

    def stage(self, batch: Batch, rows: SampledRows = (), counted: Counted | None = None) -> Staged[StepLogits] | None:
        """A call that computes the batch; None: no graph fits, nothing was done.

        rows: how the batch's rows of logits are drawn, in their order. They are drawn at once where as_plain knows how, or
        where nothing but penalties is in its way. (): not given.
        counted: of the rows that are penalised.

        Its logits, float32 [R, vocab_size], and what is beside them are valid until the next one is made.
        """
        num_decodes = _count_decodes(batch)
        if num_decodes is None or not self._is_within(batch):
            return None
        num_rows, count = len(batch.seq_lens), len(batch.logit_rows)
        size = self._sizes.find(num_decodes, len(batch.token_ids) - num_decodes, num_rows - num_decodes, count)
        if size is None:
            return None
        draws = None
        if len(rows) == count:
            draws = rows if counted is not None and isinstance(rows, PlainDraws) else as_plain(rows)
        inputs = self._reads.inputs.stage(batch, num_decodes, size, draws, None if counted is None else counted.rows)
        drawing = None
        if draws is not None and (drawn := size_for(count, self._sizes.decodes)) is not None:
            drawing = (self._graphs.draw if counted is None else self._graphs.penalise).get(drawn)
        replay = partial(self._replay, inputs, size, drawing, None if draws is None else counted, count)
        return Staged(replay, inputs.give_back)

    def _is_within(self, batch: Batch) -> bool:
        shape = self._shape
        if batch.block_tables.shape[1] > shape.table_width or int(batch.positions.max()) >= shape.num_positions:
            return False
        return (shape.num_groups == 1 and not shape.state_groups) or batch.group_tables is not None

    def _replay(
        self, copy: Callable[[], None], size: StepSize, drawing: Drawing | None, counted: Counted | None, count: int
    ) -> StepLogits:
        copy()
        self._graphs.steps[size].replay()
        self.num_replays += 1
        self.num_with_prompts += size.prompts > 0
        if counted is not None:
            counted.bring()
            self.num_penalised += 1
        made = self._reads.made
        if drawing is not None:
            graph, made = drawing
            graph.replay()
            self.num_draws += 1
        return made if len(made.values) == count else made.first(count)


def _count_decodes(batch: Batch) -> int | None:
    """How many rows have one token; None: they do not come first, or some row does not see all of its keys."""
    num_rows = len(batch.seq_lens)
    if batch.retention is not None:
        return None
    if len(batch.token_ids) == num_rows:
        return num_rows
    has_one = np.diff(batch.query_start_loc) == 1
    num_decodes = int(np.count_nonzero(has_one))
    return num_decodes if has_one[:num_decodes].all() else None


def capture_steps(
    compute: PlainStep,
    shape: StepShape,
    device: torch.device,
    api: GraphApi,
    queue: DeviceQueue,
    last: LastTokens,
    counts: TokenCounts | None,
    *,
    progress: bool,
    split: Split = WHOLE,
) -> GraphedSteps:
    """Capture every size, the largest first: the smaller ones fit its memory.

    queue: the graphs are replayed in its order.
    last: of as many rows as there are sequences, and one more for padding; its memory stays where it is.
    counts: of as many rows as a step has; None: this rank gives no logits.
    progress: show a bar on stderr.
    split: of several ranks, the one that captures here.
    """
    sizes = StepSizes(shape.most_rows, shape.most_prompt_tokens)
    all_sizes, most = list(sizes), sizes.decodes[-1]
    prompt_tokens = max(size.prompt_tokens for size in all_sizes)
    inputs = StepInputs(
        InputsShape(
            tokens=max(size.decodes + size.prompt_tokens for size in all_sizes),
            logits=most,
            decodes=most,
            prompts=max(size.prompts for size in all_sizes),
            groups=shape.num_groups,
            table_width=shape.table_width,
            prompt_width=max(shape.table_width, -(-prompt_tokens // shape.block_size)),
            states=shape.state_groups,
            block_size=shape.block_size,
        ),
        device,
        queue,
        padding_row=len(last.tensor) - 1,
        padding_slot=0 if counts is None else counts.padding_slot,
        pin_memory=device.type == "cuda",
    )
    token_ids, likeliest, outcomes = torch.zeros((3, most), dtype=torch.int64, device=device)
    vocab_size = 0 if counts is None else shape.vocab_size
    made = StepLogits(torch.zeros((most, vocab_size), device=device), likeliest, outcomes)
    reads = GraphReads(inputs, Scratch(device), made, token_ids, last, counts, split.together)
    with_others = api if split.num_ranks == 1 else AgreedGraphs(api, split, device)
    steps, draw, penalise = dict[StepSize, Graph](), dict[int, Drawing](), dict[int, Drawing]()
    for size in tqdm(all_sizes, "capturing", unit="graph", file=sys.stderr, disable=not progress):
        inputs.pad(size)
        steps[size], _ = with_others.capture(partial(_compute_and_choose, compute, reads, size))
        reads.scratch.fix()
    if counts is None:
        return GraphedSteps(shape, sizes, reads, Graphs(steps, draw, penalise))
    for count in reversed(sizes.decodes):
        found, rows = made.first(count), inputs.tensors(StepSize(count, 0, 0, count))["rows"]
        penalised = partial(penalise_counted, found.values, counts.tensor, inputs.counting(token_ids[:count]))
        drawn = partial(_draw, found, inputs.drawing(count), rows, last)
        draw[count], penalise[count] = api.capture(drawn), api.capture(partial(drawn, penalised))
    return GraphedSteps(shape, sizes, reads, Graphs(steps, draw, penalise))


def _compute_and_choose(compute: PlainStep, reads: GraphReads, size: StepSize) -> None:
    """Leave what is made of a step of this size in what the graphs read."""
    tensors, last, made = reads.inputs.tensors(size), reads.last, reads.made.first(size.logits)
    token_ids = reads.together.share(last.filled_there(tensors["token_ids"], tensors["awaited_rows"]))
    compute({**tensors, "token_ids": token_ids}, reads.scratch, made.values)
    if reads.counts is None:
        return
    found = with_likeliest(made.values)
    assert made.likeliest is not None and made.outcomes is not None and found.likeliest is not None
    assert found.outcomes is not None
    made.likeliest.copy_(found.likeliest)
    made.outcomes.copy_(found.outcomes)
    reads.token_ids[: size.logits].copy_(token_ids[tensors["logit_rows"]])
    last.tensor.index_copy_(0, tensors["rows"], made.likeliest)


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
