"""Prefill by FlashInfer (arXiv 2501.01005) where its package is installed: a layer's view of the arena is its paged tensor.

Owns its wrappers, and how our tables become its lists of pages. A wrapper plans on the host, in pinned memory of its own that
it copies from: that copy has to be over before the same wrapper plans again. So steps take turns with them. Names no layer of
a model and no step.
"""

import importlib
import importlib.metadata
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..checks import require

_OP = "flashinfer_prefill"
_DISTRIBUTION = "flashinfer-python"
_OLDEST, _UNTRIED = (0, 6, 2), (0, 8)  # of its versions, as in pyproject.toml
FEWEST_QUERIES = 64  # of a step: fewer are over before a plan is made
HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_TILE_ROWS, _TILES_PER_MULTIPROCESSOR = 128, 2  # of what its kernels split over keys

Int32Array = npt.NDArray[np.int32]
Integers = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class FlashInfer:
    """The package, or why it is not used."""

    package: Any
    version: str
    why_not: str = ""


def find_flashinfer(*, wanted: bool) -> FlashInfer:
    """Import the package, where it is wanted, installed and of a version that is known."""
    if not wanted:
        return FlashInfer(None, "", "--no-flashinfer")
    if find_spec("flashinfer") is None:
        return FlashInfer(None, "", "the extra flashinfer is not installed")
    try:
        version = importlib.metadata.version(_DISTRIBUTION)
        if not _OLDEST <= _numbers(version) < _UNTRIED:
            least, untried = (".".join(map(str, numbers)) for numbers in (_OLDEST, _UNTRIED))
            return FlashInfer(None, version, f"version {version} is not one from {least} on and below {untried}")
        return FlashInfer(importlib.import_module("flashinfer"), version)
    except Exception as error:  # what the import of a package with libraries of its own may raise
        return FlashInfer(None, "", f"the import failed: {error}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def why_not_for(dtype: torch.dtype, head_dim: int) -> str:
    """Why K and V like these go without it; empty: they need not."""
    if dtype not in _DTYPES:
        return f"K and V are {str(dtype).removeprefix('torch.')}"
    return "" if head_dim in HEAD_DIMS else f"heads have {head_dim} elements"


@dataclass(frozen=True, slots=True)
class PromptPages:
    """Which pages the queries of a step's prompts see, on the host.

    Attributes:
        query_starts, page_starts: int32 [S + 1], where each sequence's queries and pages begin.
        pages: int32 [N].
        last_lens: int32 [S], tokens of each sequence's last page.
        window: keys visible to a query, itself included; None: all before it.
    """

    query_starts: Int32Array
    page_starts: Int32Array
    pages: Int32Array
    last_lens: Int32Array
    window: int | None


def find_pages(
    tables: Integers, seq_lens: Integers, query_starts: Integers, block_size: int, window: int | None
) -> PromptPages:
    """The pages of tables [S, W]. Pages before the first query's window are left out: they may have been given back."""
    lens = seq_lens.astype(np.int64)
    firsts = np.zeros_like(lens)
    if window is not None:
        firsts = np.maximum(lens - np.diff(query_starts) - window + 1, 0) // block_size
    ends = -(-lens // block_size)
    counts = ends - firsts
    page_starts = np.concatenate(([0], np.cumsum(counts)))
    places = np.arange(page_starts[-1]) - np.repeat(page_starts[:-1] - firsts, counts)
    pages = tables[np.repeat(np.arange(len(lens)), counts), places]
    last_lens = (lens - (ends - 1) * block_size).astype(np.int32)
    return PromptPages(query_starts.astype(np.int32), page_starts.astype(np.int32), pages.astype(np.int32), last_lens, window)


@dataclass(slots=True, eq=False)
class Wrappers:
    """Those that one step plans with."""

    package: Any
    workspace: torch.Tensor
    made: list[Any] = field(default_factory=list)
    num_taken: int = 0

    def take(self) -> Any:
        """One that has planned nothing in this step."""
        if self.num_taken == len(self.made):
            self.made.append(self.package.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD"))
        self.num_taken += 1
        return self.made[self.num_taken - 1]


def make_workspace(device: torch.device, group: int, head_dim: int) -> torch.Tensor:
    """Memory for parts of results where keys are split, of `group` query heads to a KV head. Zeroed, as the package advises."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    num_rows = _TILES_PER_MULTIPROCESSOR * multiprocessors * _TILE_ROWS * group
    return torch.zeros(4 * num_rows * (head_dim + 1) + (1 << 20), dtype=torch.uint8, device=device)


class FlashInferPlan:
    """A step's prefill in the layers that read the same pages. Planned at the first of them, and reused by the others."""

    def __init__(self, wrappers: Wrappers, pages: PromptPages, pages_there: torch.Tensor) -> None:
        """pages_there: its pages, on the device. The rest is small, and goes there without a wait."""
        self._wrappers, self._pages, self._pages_there = wrappers, pages, pages_there
        self._planned: dict[tuple[object, ...], Any] = {}

    def attend(self, q: torch.Tensor, kv_layer: torch.Tensor, scale: float, soft_cap: float | None) -> torch.Tensor:
        """See paged_attention_prefill, which checks q and kv_layer."""
        num_queries = int(self._pages.query_starts[-1])
        require(q.shape[0] == num_queries, _OP, "q", "has {} queries of {}", q.shape[0], num_queries)
        q = q if q.stride(2) == 1 else q.contiguous()
        key = (q.shape[1], kv_layer.shape[2:], q.dtype, scale, soft_cap)
        if (wrapper := self._planned.get(key)) is None:
            wrapper = self._planned[key] = self._plan(q, kv_layer, scale, soft_cap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        wrapper.run(q, kv_layer, out=out)
        return out

    def _plan(self, q: torch.Tensor, kv_layer: torch.Tensor, scale: float, soft_cap: float | None) -> Any:
        pages, wrapper = self._pages, self._wrappers.take()
        block_size, num_kv_heads, head_dim = kv_layer.shape[2:]
        wrapper.plan(
            torch.from_numpy(pages.query_starts),
            torch.from_numpy(pages.page_starts),
            self._pages_there,
            torch.from_numpy(pages.last_lens),
            q.shape[1],
            num_kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if pages.window is None else pages.window - 1,  # keys before the query's own
            logits_soft_cap=soft_cap,
            q_data_type=q.dtype,
            kv_data_type=kv_layer.dtype,
        )
        return wrapper
