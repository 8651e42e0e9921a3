"""FlashInferPrompts: prefill of the steps that FlashInfer serves, planned once for all layers that read the same pages.

Owns which steps those are, the lists of pages that go to the device with a step's other arrays, and which wrappers are next.
Captured steps go without: FlashInfer would plan before every replay, by a wrapper for each size of step.
"""

from collections.abc import Mapping, Sequence

import torch

from kvkeeper.kernels.attention.flashinfer_prefill import (
    FEWEST_QUERIES,
    FlashInfer,
    FlashInferPlan,
    PromptPages,
    Wrappers,
    find_pages,
    make_workspace,
    why_not_for,
)

from ..model.attention import AttentionPart
from ..model.config import ModelConfig
from ..values.batch import IntArray
from .device.device_queue import DeviceQueue, Mark

MOST_CAPTURED_TOKENS = 512  # of prompts; beyond, the device has work for longer than a plain launch of all layers takes
PagesOfStep = Mapping[tuple[int, int | None], PromptPages]  # by number of the part and window
Plans = dict[tuple[int, int | None], FlashInferPlan]


def find_obstacle(config: ModelConfig, views: Sequence[torch.Tensor]) -> str:
    """Why a model on these blocks of the parts of its layers goes without FlashInfer; empty: it need not."""
    if config.is_latent or not views:
        return "the cache holds no K and V as they are computed"
    if config.has_sink_logits:
        return "the heads have sinks of their own"
    reasons = [why_not_for(view.dtype, view.shape[-1]) for view in views]
    return reasons[0] if all(reasons) else ""


class FlashInferPrompts:
    """Steps that are computed one after another, of which two may be on their way through the device."""

    def __init__(
        self,
        found: FlashInfer,
        config: ModelConfig,
        parts: Sequence[AttentionPart],
        views: Sequence[torch.Tensor],
        queue: DeviceQueue,
    ) -> None:
        """views: of each part its blocks, see StepAttention."""
        self._parts, self._queue = parts, queue
        self._block_sizes = [0 if why_not_for(view.dtype, view.shape[-1]) else view.shape[3] for view in views]
        workspace = make_workspace(views[0].device, max(config.query_groups), max(view.shape[-1] for view in views))
        self._turns = [Wrappers(found.package, workspace) for _ in range(2)]
        self._behind: list[Mark | None] = [None, None]  # of each turn, the step that planned with it last
        self.num_planned = 0

    def find(self, arrays: Mapping[str, IntArray]) -> PagesOfStep:
        """The pages of a step's prompts; none where it has too few queries, or rows with sink and window.

        arrays: of attention_arrays.
        """
        if "prefill_lens" not in arrays or "prefill_sinks" in arrays or arrays["prefill_locs"][-1] < FEWEST_QUERIES:
            return {}
        pages = {}
        for at, (part, block_size) in enumerate(zip(self._parts, self._block_sizes, strict=True)):
            if not block_size:
                continue
            tables, lens, locs = (
                arrays.get(f"prefill_{name}_{at}", arrays[f"prefill_{name}"]) for name in ("tables", "lens", "locs")
            )
            for window in set(part.windows):
                pages[at, window] = find_pages(tables, lens, locs, block_size, window)
        return pages

    def plan(self, pages: PagesOfStep, tensors: Mapping[str, torch.Tensor]) -> Plans:
        """Plans for the layers of the next step. tensors: on the device, those of page_arrays(pages) among them."""
        self._turns.reverse()
        self._behind = [self._behind[1], self._queue.mark()]
        if (mark := self._behind[0]) is not None:
            mark.wait()  # until the device has read what the wrappers wrote for that step, which it has long since
        self._turns[0].num_taken = 0
        self.num_planned += 1
        return {key: FlashInferPlan(self._turns[0], of_part, tensors[_name(key)]) for key, of_part in pages.items()}


def page_arrays(pages: PagesOfStep) -> dict[str, IntArray]:
    """What has to be on the device."""
    return {_name(key): of_part.pages for key, of_part in pages.items()}


def _name(key: tuple[int, int | None]) -> str:
    return "prefill_pages_{}_{}".format(*key)
