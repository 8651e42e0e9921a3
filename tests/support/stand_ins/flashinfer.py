"""Stand-in for the package flashinfer: its wrapper for prefill over pages, with what its own refuses, computed by torch.

Parameters have the names and the order that the package gives them, as far as we pass any; test_flashinfer_prefill compares
both where the package can be had. `run` reads what `plan` was given, as late as that.
"""

import math
from typing import Any

import torch

made: list["BatchPrefillWithPagedKVCacheWrapper"] = []


class BatchPrefillWithPagedKVCacheWrapper:
    """plans, runs: how often each was called."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.is_contiguous()
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "NHD"
        self._device = float_workspace_buffer.device
        self.plans: list[dict[str, Any]] = []
        self.num_runs = 0
        made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        num_seqs = len(qo_indptr) - 1
        for column, length in ((qo_indptr, num_seqs + 1), (paged_kv_indptr, num_seqs + 1), (paged_kv_last_page_len, num_seqs)):
            assert column.device.type == "cpu", "a column of the device would be waited for"
            assert column.dtype == torch.int32
            assert column.shape == (length,)
            assert column.is_contiguous()
        assert paged_kv_indices.device == self._device
        assert paged_kv_indices.dtype == torch.int32
        assert paged_kv_indices.shape == (int(paged_kv_indptr[-1]),)
        assert int(qo_indptr[0]) == int(paged_kv_indptr[0]) == 0
        assert bool((qo_indptr.diff() > 0).all())
        assert bool((paged_kv_indptr.diff() > 0).all())
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        assert causal
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in (64, 128, 256)
        assert q_data_type == kv_data_type
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert window_left >= -1
        self.plans.append(
            {
                "query_starts": qo_indptr.tolist(),
                "page_starts": paged_kv_indptr.tolist(),
                "pages": paged_kv_indices,
                "last": paged_kv_last_page_len.tolist(),
                "shape": (num_qo_heads, page_size, num_kv_heads, head_dim_qk, q_data_type),
                "scale": 1 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale,
                "window_left": window_left,
                "cap": logits_soft_cap or 0.0,
            }
        )

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor | None = None, **_: object
    ) -> torch.Tensor:
        plan = self.plans[-1]
        num_heads, page_size, num_kv_heads, head_dim, dtype = plan["shape"]
        assert q.shape == (plan["query_starts"][-1], num_heads, head_dim)
        assert q.stride(2) == 1
        assert q.dtype == paged_kv_cache.dtype == dtype
        assert paged_kv_cache.shape[1:] == (2, page_size, num_kv_heads, head_dim)
        assert paged_kv_cache.stride()[2:] == (num_kv_heads * head_dim, head_dim, 1)
        assert q.device == paged_kv_cache.device == self._device
        assert out is not None
        assert out.shape == q.shape
        assert out.dtype == dtype
        assert out.is_contiguous()
        self.num_runs += 1
        for seq, last in enumerate(plan["last"]):
            first, end = plan["query_starts"][seq : seq + 2]
            begin, stop = plan["page_starts"][seq : seq + 2]
            out[first:end] = self._attend(q[first:end], paged_kv_cache, plan, plan["pages"][begin:stop], last)
        return out

    def _attend(
        self, q: torch.Tensor, cache: torch.Tensor, plan: dict[str, Any], pages: torch.Tensor, last: int
    ) -> torch.Tensor:
        num_keys = (len(pages) - 1) * cache.shape[2] + last
        k, v = (cache[pages.long(), part].flatten(0, 1)[:num_keys].float() for part in (0, 1))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * plan["scale"]
        if plan["cap"] > 0:
            scores = plan["cap"] * (scores / plan["cap"]).tanh()
        positions = torch.arange(num_keys - len(q), num_keys)[:, None]
        keys = torch.arange(num_keys)[None]
        seen = keys <= positions
        if plan["window_left"] >= 0:
            seen &= keys + plan["window_left"] >= positions
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
