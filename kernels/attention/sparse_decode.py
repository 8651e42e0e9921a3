"""Decode attention as two sparse products, so that a CPU reads K and V in place.

The scores of a step are a sparse matrix: a row for every query head of every sequence, a column for every slot of the layer, an
entry where the sequence has a token there. torch's sampled_addmm computes exactly those entries and embedding_bag adds up the
values that they weigh; both walk an index, and nothing is gathered. Measured in a decoder, 16 sequences of 180 tokens, 8 heads
over 4, one thread: 480 us a layer, against 780 for gathering keys and values and torch's fused attention on them. It wins
wherever up to four query heads share a KV head, more so with several threads; with eight and contexts beyond a thousand tokens
it takes up to half as long again on one thread, because each query head reads the keys for itself.

Where sequences have sinks (retention.py), each head has two rows of scores in turn, its sinks' and its window's, with a query
each. Entries stay in order of position, so nothing else differs.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch

from ..checks import slot_rows
from .paged_rows import Int64Array

with warnings.catch_warnings():  # torch warns once that sparse tensors are in beta state; tests cover the parts used here
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.empty(0, dtype=torch.int64), torch.empty(0), size=(1, 1))


@dataclass(frozen=True, slots=True)
class HeadPattern:
    """The places of a step's entries, for one number of heads; S sequences, N heads, E entries, row by row, by position.

    Attributes:
        scores: sparse CSR float32 [S * N, num rows of keys], or [S * N * 2, ...] with sinks; every layer overwrites its values.
        kv_rows: int64 [E], each entry's row among a layer's keys, and among its values.
        row_starts: int64 [S * N], each row's first entry.
        padded: float32 [S * N, longest row], the scores as softmax takes them; -inf where a row has no entry, for good.
        places: int64 [E], each entry's index into the flat `padded`.
    """

    scores: torch.Tensor
    kv_rows: torch.Tensor
    row_starts: torch.Tensor
    padded: torch.Tensor
    places: torch.Tensor


class SparseDecode:
    """The slots that a step's decode attention reads: the same for all layers, and for any number of heads."""

    def __init__(
        self,
        tables: Int64Array,
        starts: Int64Array,
        lens: Int64Array,
        kv_layer: torch.Tensor,
        sinks: Int64Array | None = None,
    ) -> None:
        """Sequence s, with blocks tables[s], sees its tokens [0, sinks[s]) and [starts[s], lens[s])."""
        self.sinks = sinks
        self._spans = lens - starts if sinks is None else sinks + lens - starts
        seqs = np.repeat(np.arange(len(lens)), self._spans)
        _, _, block_size, num_kv_heads, head_dim = kv_layer.shape
        positions = _ranks(self._spans)
        if sinks is None:
            positions += starts[seqs]
        else:
            positions += np.where(positions < sinks[seqs], 0, (starts - sinks)[seqs])
        blocks, offsets = np.divmod(positions, block_size)
        slots = tables[seqs, blocks] * (kv_layer.stride(0) // (num_kv_heads * head_dim)) + offsets
        self._first_rows = slots * num_kv_heads  # [T], of each token's heads
        self._num_kv_heads = num_kv_heads
        # Keys and values seen as rows of one head; the values begin so many rows behind the keys.
        self.first_value = kv_layer.stride(1) // head_dim
        self._num_rows = slot_rows(kv_layer, head_dim).shape[0] - self.first_value
        self._patterns: dict[int, HeadPattern] = {}

    def pattern(self, num_heads: int) -> HeadPattern:
        """Made by the first layer that asks."""
        if num_heads not in self._patterns:
            self._patterns[num_heads] = self._make(num_heads)
        return self._patterns[num_heads]

    def _make(self, num_heads: int) -> HeadPattern:
        num_seqs, longest = len(self._spans), int(self._spans.max(initial=0))
        kv_heads = np.tile(np.arange(num_heads) // (num_heads // self._num_kv_heads), num_seqs)
        counts = np.repeat(self._spans, num_heads)  # entries of each row
        ends, ranks = np.cumsum(counts), _ranks(counts)
        first_tokens = np.repeat(np.cumsum(self._spans) - self._spans, num_heads)
        kv_rows = self._first_rows[np.repeat(first_tokens, counts) + ranks] + np.repeat(kv_heads, counts)
        columns = torch.from_numpy(kv_rows)
        num_rows, row_starts = num_seqs * num_heads, ends - counts
        bounds = np.concatenate(([0], ends))
        if self.sinks is not None:
            bounds = np.append(np.stack((row_starts, row_starts + np.repeat(self.sinks, num_heads)), 1), len(kv_rows))
        size = (len(bounds) - 1, self._num_rows)
        values = torch.zeros(len(kv_rows))
        return HeadPattern(
            scores=torch.sparse_csr_tensor(torch.from_numpy(bounds), columns, values, size=size, check_invariants=False),
            kv_rows=columns,
            row_starts=torch.from_numpy(row_starts),
            padded=torch.full((num_rows, longest), -torch.inf),
            places=torch.from_numpy(np.repeat(np.arange(num_rows) * longest, counts) + ranks),
        )


def sparse_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: SparseDecode,
    *,
    scale: float,
    soft_cap: float | None,
    q_sink: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [S, num_heads, head_dim], float32, as paged_attention_decode does. A sequence that sees nothing gets zeros.

    q_sink: like q, scores the sinks, where the plan has such.
    sink_logits: [num_heads], of a key without a value; None: there is none.
    """
    pattern = plan.pattern(q.shape[1])
    rows = slot_rows(kv_layer, q.shape[2])
    keys, values = rows[: pattern.scores.shape[1]], rows[plan.first_value :]
    queries = q
    if plan.sinks is not None:
        assert q_sink is not None, "sinks come with the query that scores them"
        queries = torch.stack((q_sink, q), 2)
    queries = queries.reshape(-1, q.shape[2])
    torch.sparse.sampled_addmm(pattern.scores, queries, keys.t(), beta=0.0, alpha=scale, out=pattern.scores)
    scores = pattern.scores.values()
    if soft_cap is not None:
        scores = (scores / soft_cap).tanh_().mul_(soft_cap)
    pattern.padded.view(-1).index_copy_(0, pattern.places, scores)
    padded = pattern.padded
    if sink_logits is not None:
        padded = torch.cat((padded, sink_logits.repeat(q.shape[0])[:, None]), 1)
    weights = torch.softmax(padded, 1)[:, : pattern.padded.shape[1]].reshape(-1).index_select(0, pattern.places)
    bags = torch.nn.functional.embedding_bag(
        pattern.kv_rows, values, pattern.row_starts, mode="sum", per_sample_weights=weights
    )
    return bags.view(q.shape)


def _ranks(counts: Int64Array) -> Int64Array:
    """0 .. count - 1 for each of the counts, concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
