"""ModelRunner: the model on the memory of the cache service.

Turns a Batch into tensors, runs the decoder on the arena that it was given, and returns logits. It holds no K or V of
its own and knows no sequence: the block tables say which blocks to read and write.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import structlog
import torch
from tqdm import tqdm

from kvkeeper.kernels.attention.flashinfer_prefill import FEWEST_QUERIES, FlashInfer
from kvkeeper.kernels.copy_blocks import copy_blocks, move_blocks
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.gpu.variants import MANY_STORED, group_tokens, prefill_lens
from kvkeeper.kernels.layout import KvLayout, KvShape
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer
from kvkeeper.kernels.scratch import Scratch

from ..model.attention import StepAttention, attention_arrays, attention_parts, build_step_attention
from ..model.checkpoint.errors import ModelError
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.layer_groups import LayerGroup
from ..model.recurrent.state_pages import State, build_state_metadata, state_arrays, view_states
from ..model.split import WHOLE
from ..model.stored_attention import StoredAttention, build_stored_attention
from ..model.transformers_model import ModelShape, TransformersModel
from ..values.batch import Batch, IntArray
from ..values.sampling_params import SampledRows
from .decode_programs import DecodePrograms
from .device.device_errors import find_fault, lost_by
from .device.device_queue import DeviceQueue, make_queue
from .device.token_counts import Counted, LastTokens, TokenCounts
from .device.upload import Staged, upload_to
from .flashinfer_prompts import MOST_CAPTURED_TOKENS, FlashInferPrompts, PagesOfStep, find_obstacle, page_arrays
from .graphs.graph_api import GraphApi, NotCaptured
from .graphs.graphed_steps import GraphedSteps, StepShape, capture_steps
from .graphs.step_sizes import MOST_ROWS
from .graphs.warm_up import warm_up_batches, warm_up_sampling
from .sampler import StepLogits

log = structlog.get_logger()


AnyLayout = KvLayout | QuantisedLayout


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The largest step to make ready for: rows of it, tokens of one sequence, and tokens of all of them.

    may_retain: whether rows may have sink and window, if the model can do with that.
    """

    most_rows: int
    most_tokens: int
    most_step_tokens: int = 4096
    may_retain: bool = True


class Runner(Protocol):
    """What the engine's loop needs of a model; ModelRunner and the hash toy both are one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def layout(self) -> AnyLayout: ...

    def forward(self, batch: Batch) -> torch.Tensor: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def synchronize(self) -> None: ...


@runtime_checkable
class Concluding(Protocol):
    """A Runner that has to hear of the end of a step that had no batch."""

    def end_without_batch(self) -> None: ...


@runtime_checkable
class StagingRunner(Protocol):
    """A Runner that takes what a batch says before it computes it, and tokens that the step before draws. See ModelRunner."""

    @property
    def last_tokens(self) -> LastTokens: ...

    def stage(self, batch: Batch, rows: SampledRows = (), counted: Counted | None = None) -> Staged[StepLogits]: ...


@runtime_checkable
class Warmed(Protocol):
    """A Runner with something to do before its first step, as on a device."""

    def make_ready(
        self,
        bounds: StepBounds,
        graphs: GraphApi | None,
        *,
        with_retention: bool,
        progress: bool,
        flashinfer: FlashInfer | None = None,
    ) -> None: ...


# The same in what the engine needs of it; Decoder explains forward.
Model = Decoder | TransformersModel
Shape = ModelConfig | ModelShape


def make_kv_layout(config: Shape, dtype: torch.dtype, block_size: int, groups: Sequence[LayerGroup] = ()) -> KvLayout:
    """The layout of the blocks that a model of this config, computing in `dtype`, needs. groups: a block has one's layers."""
    heads, kept = (config.num_kv_heads, config.head_dim), [group for group in groups if not group.is_recurrent]
    shapes = [KvShape(len(group.layers), group.num_kv_heads or heads[0], group.head_dim or heads[1]) for group in kept]
    if any(group.num_kv_heads for group in kept):
        first, *others = shapes
        return KvLayout(first.num_layers, first.num_kv_heads, first.head_dim, dtype, block_size, others=tuple(others))
    num_layers = max((shape.num_layers for shape in shapes), default=config.num_kv_layers)
    return KvLayout(num_layers, *heads, dtype, block_size, config.is_latent)


def _needed_layout(model: Model, layout: AnyLayout, groups: Sequence[LayerGroup]) -> AnyLayout:
    """The one like `layout` that the model computes on."""
    if not isinstance(layout, QuantisedLayout):
        return make_kv_layout(model.config, model.dtype, layout.block_size, groups)
    config, tail_layers = model.config, len(groups[1].layers) if groups else 0
    return QuantisedLayout(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        layout.block_size,
        layout.kv_format,
        model.dtype,
        tail_layers,
    )


def _view_states(model: Model, kv_view: torch.Tensor, groups: Sequence[LayerGroup]) -> dict[int, list[State]]:
    """The states of the layers of the recurrent groups, by number of the group."""
    if not isinstance(model, Decoder) or model.config.recurrent is None:
        return {}
    tensors = model.config.recurrent.shape.state
    return {at: view_states(kv_view, tensors, len(group.layers)) for at, group in enumerate(groups) if group.is_recurrent}


class ModelRunner:
    """A decoder on an arena."""

    def __init__(
        self,
        model: Model,
        kv_view: torch.Tensor,
        layout: AnyLayout,
        groups: Sequence[LayerGroup] = (),
        queue: DeviceQueue | None = None,
    ) -> None:
        """
        Args:
            model: the loaded decoder.
            kv_view: the layout's view of the arena.
            layout: the arena's.
            groups: of the layers; () where a block has all of them, and no tail is beside it.
            queue: the order in which the arena's device works; None: that of its kind.

        Raises:
            ModelError: the arena's layout is not the model's.
        """
        needed = _needed_layout(model, layout, groups)
        dtype = torch.uint8 if isinstance(layout, QuantisedLayout) else layout.dtype
        if layout != needed or kv_view.shape[1:] != layout.view_shape or kv_view.dtype != dtype:
            raise ModelError(f"the arena's layout {layout} is not the model's {needed}")
        self._stored = (
            tuple(get_layer(kv_view, layout, layer) for layer in range(layout.num_layers))
            if isinstance(layout, QuantisedLayout)
            else ()
        )
        self._model = model
        self._kv_view = kv_view
        self._layout = layout
        self._groups = groups
        config = model.config
        self._parts, self._places = attention_parts(() if self._stored else groups, config.windows, config.chunks, config.reads)
        self._views = (
            tuple(layout.view_group(kv_view, part.table) for part in self._parts) if isinstance(layout, KvLayout) else ()
        )
        self._states = _view_states(model, kv_view, groups)
        self._scratch = Scratch(kv_view.device)
        self.queue = queue or make_queue(kv_view.device)
        self._upload = upload_to(kv_view, self.queue)
        self.last_tokens = LastTokens(kv_view.device)  # of several ranks, the first one's are shared with each step
        self._share = (model.split if isinstance(model, Decoder) else WHOLE).together.share
        self._num_positions = 0  # that the model has tables for, once it is made ready
        self.counts: TokenCounts | None = None  # of tokens that penalties depend on, once it is made ready
        self.graphed: GraphedSteps | None = None
        self.prompts: FlashInferPrompts | None = None  # once it is made ready, where FlashInfer serves
        # What ranks add up passes torch by, so that a program would leave it out.
        may_record = (
            isinstance(model, Decoder)
            and model.is_whole
            and compiled.serves(torch.empty(0, dtype=model.dtype, device=kv_view.device))
        )
        self.programs = DecodePrograms(kv_view) if may_record else None

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def layout(self) -> AnyLayout:
        return self._layout

    @torch.inference_mode()
    def make_ready(
        self,
        bounds: StepBounds,
        graphs: GraphApi | None,
        *,
        with_retention: bool,
        progress: bool,
        flashinfer: FlashInfer | None = None,
    ) -> None:
        """Run all variants of all kernels, so that none is compiled while requests wait, and capture decodes if graphs can be.

        The log names a decoder whose launches cannot be captured; it computes plainly.

        Args:
            with_retention: whether steps will have rows with sink and window.
            progress: show bars on stderr.
            flashinfer: for prompts, where it serves the model; the log says whether it does. None: nothing is said.
        """
        device = self._kv_view.device
        if not isinstance(self._model, Decoder) or self._model.gives_logits:
            self.counts = TokenCounts(bounds.most_rows, self.vocab_size, bounds.most_tokens, device)
        self._warm_up(bounds, with_retention=with_retention, progress=progress)
        if flashinfer is not None:
            why_not = flashinfer.why_not or self._try_flashinfer(flashinfer, bounds)
            kernel = "kvkeeper" if why_not else f"flashinfer {flashinfer.version}"
            log.info("prefill_attention", kernel=kernel, **({"why": why_not} if why_not else {}))
        if graphs is not None and (shape := self.find_shape(bounds)) is not None:
            self.capture(shape, bounds, graphs, progress=progress)

    def find_shape(self, bounds: StepBounds) -> StepShape | None:
        """The largest step to capture, once all else is ready; None: nothing is captured of such a model."""
        if not isinstance(self._model, Decoder):
            return None
        num_positions = self._model.reserve_positions(bounds.most_tokens)
        block_size = self._layout.block_size
        width = -(-bounds.most_tokens // block_size)
        most_rows, num_groups = min(bounds.most_rows, MOST_ROWS), max(len(self._groups) - len(self._states), 1)
        # Tables of prompts in chunks are made by the host, as many as there are chunks; and so are the chunks of a recurrence.
        has_chunks = bool(self._states) or any(part.chunk is not None for part in self._parts)
        prompt_tokens = 0 if has_chunks else bounds.most_step_tokens
        if self.prompts is not None:
            prompt_tokens = min(prompt_tokens, MOST_CAPTURED_TOKENS)
        of_rows = most_rows, width, block_size, num_positions, self.vocab_size
        return StepShape(*of_rows, prompt_tokens, num_groups, tuple(self._states))

    @torch.inference_mode()
    def capture(self, shape: StepShape, bounds: StepBounds, graphs: GraphApi, *, progress: bool) -> None:
        """Capture steps, as make_ready does; all ranks at once, of the shape that the first one has found."""
        assert isinstance(self._model, Decoder), "it has a shape"
        self._num_positions, device = self._model.reserve_positions(bounds.most_tokens), self._kv_view.device
        self.last_tokens.fix(bounds.most_rows + 1)
        of_runner = self.queue, self.last_tokens, self.counts
        split = self._model.split
        try:
            self.graphed = capture_steps(self._plain_step, shape, device, graphs, *of_runner, progress=progress, split=split)
        except Exception as error:  # whatever a driver says of it, the engine can serve, but on no lost device
            if lost_by(error) is not None or not (split.num_ranks == 1 or isinstance(error, NotCaptured)):
                raise
            log_failure, fault = log.exception, find_fault(error)
            if fault is not None and fault.is_out_of_memory:
                log_failure = partial(log.warning, why=fault.text())
            log_failure("graphs_failed", message="steps are computed without CUDA graphs; --no-graphs does not try them")
            self.synchronize()

    def _try_flashinfer(self, flashinfer: FlashInfer, bounds: StepBounds) -> str:
        """Compute prompts by it from now on; if it cannot, why. Its kernels are compiled here, which may take minutes."""
        if not isinstance(self._model, Decoder):
            return "the transformers library runs the model"
        if why_not := find_obstacle(self._model.config, self._views):
            return why_not
        prompts = FlashInferPrompts(flashinfer, self._model.config, self._parts, self._views, self.queue)
        self.prompts = prompts
        try:
            for batch in warm_up_batches(self._layout.block_size, bounds.most_tokens, (), (), (), with_retention=False):
                if len(batch.token_ids) >= FEWEST_QUERIES:
                    self.forward(batch)
            self.synchronize()
        except Exception as error:  # of a package that compiles and loads kernels; ours serve, but on no lost device
            if lost_by(error) is not None:
                raise
            self.prompts = None
            return f"it failed: {error}"
        if not prompts.num_planned:
            self.prompts = None
            return "no prompt is long enough"
        return ""

    def _warm_up(self, bounds: StepBounds, *, with_retention: bool, progress: bool) -> None:
        prompt_lens = prefill_lens(self._model.config.query_groups)
        sizes = [size for size in self._step_sizes() if size <= bounds.most_step_tokens]
        counts = group_tokens(1, 1) if isinstance(self._model, Decoder) and self._model.has_integers else []
        counts = [count for count in counts if count <= bounds.most_step_tokens]
        shapes = self._layout.block_size, bounds.most_tokens, prompt_lens, sizes, counts
        batches = list(warm_up_batches(*shapes, with_retention=with_retention))
        for batch in tqdm(batches, "warming up", unit="step", file=sys.stderr, disable=not progress):
            logits = self.forward(batch)
            if self.counts is not None:
                warm_up_sampling(logits, self.counts)
        if self._kv_view.is_cuda:
            with self._current_device():
                move_blocks(self._kv_view, self._kv_view, [(0, 0)])  # the null block onto itself: it stays as it is
        self.synchronize()

    def _step_sizes(self) -> list[int]:
        """Tokens of steps that reach all variants of the kernels that are chosen by them."""
        if not isinstance(self._model, Decoder):
            return [MANY_STORED]
        experts = self._model.config.experts
        return [] if experts is None else group_tokens(experts.num_experts, experts.routing.num_chosen)

    def _plain_step(self, tensors: Mapping[str, torch.Tensor], scratch: Scratch, logits: torch.Tensor) -> torch.Tensor:
        """See graphed_steps.PlainStep."""
        assert isinstance(self._model, Decoder), "other models are not captured"
        metadata = self._attention(tensors, scratch)
        token_ids, positions, last = tensors["token_ids"], tensors["positions"], self._num_positions - 1
        return self._model.forward(token_ids, positions, last, metadata, tensors["logit_rows"], logits)

    def _attention(
        self, tensors: Mapping[str, torch.Tensor], scratch: Scratch, pages: PagesOfStep | None = None
    ) -> StepAttention | StoredAttention:
        """pages: of prompts that FlashInfer computes; None: it computes none."""
        if self._stored:
            return build_stored_attention(tensors, self._stored)
        plans = self.prompts.plan(pages, tensors) if self.prompts is not None and pages else {}
        found = build_step_attention(tensors, self._views, self._parts, self._places, self._model.dtype, scratch, plans)
        if not self._states:
            return found
        states = {group: build_state_metadata(tensors, group, layers) for group, layers in self._states.items()}
        return replace(found, states=states)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's tokens, writing their K and V into their slots.

        Returns:
            Logits of batch.logit_rows, float32 [R, vocab_size], valid until the next call.
        """
        return self.stage(batch)().values

    def stage(self, batch: Batch, rows: SampledRows = (), counted: Counted | None = None) -> Staged[StepLogits]:
        """Take what the batch says; it may change before the call that computes it, as forward does, is made.

        rows: how a token is drawn from each row of logits, in their order: a graph draws what it can. (): not given.
        counted: of the rows that are penalised, by `counts`.
        """
        replay = self.stage_replay(batch, rows, counted)
        return self.stage_plain(batch) if replay is None else replay

    def stage_replay(self, batch: Batch, rows: SampledRows = (), counted: Counted | None = None) -> Staged[StepLogits] | None:
        """The same by a graph; None: none was captured for it, nothing was done."""
        replay = None if self.graphed is None else self.graphed.stage(batch, rows, counted)
        return None if replay is None else Staged(partial(self._on_device, replay), replay.give_back)

    def stage_plain(self, batch: Batch) -> Staged[StepLogits]:
        """The same without a graph."""
        arrays: dict[str, IntArray] = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "logit_rows": batch.logit_rows,
        }
        if batch.awaited_rows is not None:
            arrays["awaited_rows"] = batch.awaited_rows
        arrays |= attention_arrays(batch, self._parts, self._layout.block_size, self._states)
        if self._states:
            arrays |= state_arrays(batch, tuple(self._states), self._layout.block_size)
        pages = {} if self.prompts is None else self.prompts.find(arrays)
        upload = self._upload.stage(arrays | page_arrays(pages))
        programs = self.programs if batch.only_decodes else None
        attention = partial(self._attention, scratch=self._scratch, pages=pages)
        plain = partial(self._plain, upload, int(batch.positions.max()), attention, programs)
        return Staged(partial(self._on_device, plain), upload.give_back)

    @torch.inference_mode()
    def _on_device(self, compute: Callable[[], StepLogits]) -> StepLogits:
        with self._current_device():
            return compute()

    def _plain(
        self,
        upload: Callable[[], Mapping[str, torch.Tensor]],
        max_position: int,
        attention: Callable[[Mapping[str, torch.Tensor]], StepAttention | StoredAttention],
        programs: DecodePrograms | None,
    ) -> StepLogits:
        """Without a graph. programs: of a step that only decodes; None: it does more, or there are none."""
        tensors = upload()
        token_ids = tensors["token_ids"]
        if "awaited_rows" in tensors:
            token_ids = self._share(self.last_tokens.filled_there(token_ids, tensors["awaited_rows"]))
        metadata = attention(tensors)
        of_step = token_ids, tensors["positions"], max_position, metadata
        if programs is not None and isinstance(self._model, Decoder):
            return StepLogits(self._model.forward(*of_step, None, run_layers=programs.run))
        return StepLogits(self._model.forward(*of_step, tensors["logit_rows"]))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Run (source, destination) block copies in order; a later one sees what earlier ones wrote."""
        with self._current_device():
            copy_blocks(self._kv_view, pairs)

    def synchronize(self) -> None:
        """Wait until the device has done all the work it was given."""
        if self._kv_view.device.type == "cuda":
            torch.cuda.synchronize(self._kv_view.device)

    def _current_device(self) -> AbstractContextManager[None]:
        """Kernels are launched on the thread's current device."""
        return torch.cuda.device(self._kv_view.device) if self._kv_view.device.type == "cuda" else nullcontext()
