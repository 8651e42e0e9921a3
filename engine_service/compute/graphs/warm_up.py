"""Steps that run every variant of every kernel once, so that none is compiled while requests wait.

They see the null block and write nothing: their tokens have no slots. Which variant runs follows from how many tokens there
are, of how many sequences, behind how many keys: kvkeeper.kernels.gpu.variants says how few are enough for each.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from ...values.batch import Batch, BatchRetention
from ...values.sampling_params import GREEDY, LIKELIEST, PenalisedRows, PlainDraws, SamplingParams, SamplingRow
from ..device.token_counts import LastTokens, TokenCounts
from ..sampler import StepLogits, draw, sample

_SHORT_CONTEXT = 1  # tokens
_LONG_CONTEXT = 4096  # tokens, with the new ones; cut into items, and split where few queries see it
_SHORT_PROMPT, _LONG_PROMPT = 2, 256
_MANY = 16  # decodes, among which a prefix in common is looked for


def warm_up_batches(
    block_size: int,
    most_tokens: int,
    prompt_lens: Iterable[int],
    step_sizes: Iterable[int],
    row_counts: Iterable[int],
    *,
    with_retention: bool,
) -> Iterator[Batch]:
    """Decodes and prompts, short and long, apart and together, as far as a sequence may have so many tokens.

    Args:
        most_tokens: of a sequence.
        prompt_lens: of prompts that reach all variants of attention, each by itself.
        step_sizes: tokens of steps that reach all variants of what is chosen by the number of a step's tokens.
        row_counts: rows of steps that reach all variants of what is chosen by the number of rows whose logits are wanted.
        with_retention: with rows that have sink and window.
    """
    prompts = sorted({*prompt_lens, _SHORT_PROMPT, _LONG_PROMPT})
    kinds = [(False, [1], _SHORT_CONTEXT), (False, [1, 1], _LONG_CONTEXT), (False, [1] * _MANY, _LONG_CONTEXT)]
    kinds += [(False, [length], context) for length in prompts for context in (0, _LONG_CONTEXT)]
    kinds += [(False, [1, _SHORT_PROMPT], _LONG_CONTEXT), (False, [1, _LONG_PROMPT], 0)]
    if with_retention:
        kinds += [(True, [1, 1], context) for context in (_SHORT_CONTEXT, _LONG_CONTEXT)]
        kinds += [(True, [length], context) for length in prompts for context in (2, _LONG_CONTEXT)]
    kinds += [(False, _shared_out(size, min(_LONG_PROMPT, most_tokens)), 0) for size in step_sizes]
    kinds += [(False, [1] * count, _SHORT_CONTEXT) for count in row_counts]
    longest = min(most_tokens, _LONG_CONTEXT)
    for is_cut, query_lens, context_len in kinds:
        lens = [min(count, longest) for count in query_lens]
        yield _batch(lens, min(context_len, longest - max(lens)), block_size, is_cut=is_cut)


def _shared_out(num_tokens: int, most_tokens: int) -> list[int]:
    """Lengths of the fewest sequences of at most so many tokens that have num_tokens between them, as even as they can be."""
    num_seqs = -(-num_tokens // most_tokens)
    return [(num_tokens + seq) // num_seqs for seq in range(num_seqs)]


def warm_up_sampling(logits: torch.Tensor, counts: TokenCounts) -> None:
    """Draw from logits [R, V] in each of the ways that a row can be drawn. counts: of no sequence yet."""
    history = np.zeros(2, np.int32)
    shaped = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, frequency_penalty=0.5)
    draw(StepLogits(logits), [LIKELIEST] * len(logits))
    for params in (GREEDY, shaped):
        sample(logits, [SamplingRow(params, 1, 0, history, 1)] * len(logits))
    one = PlainDraws.of([SamplingRow(shaped, 1, 0, history, 1)])
    own = PenalisedRows.of([SamplingRow(shaped, 1, 0, history, 1)])
    counted = counts.stage(replace(own, serials=own.which + 1))
    assert counted is not None, "there is a slot for a row"
    draw(StepLogits(logits[:1]), replace(one, penalised=own), LastTokens(logits.device), counted)


def _batch(query_lens: Sequence[int], context_len: int, block_size: int, *, is_cut: bool) -> Batch:
    """Rows of so many new tokens each, behind as many that are cached."""
    lens = np.array(query_lens, np.int32)
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    num_tokens = int(starts[-1])
    positions = np.concatenate([np.arange(context_len, context_len + count) for count in query_lens]).astype(np.int64)
    width = -(-(context_len + int(lens.max())) // block_size)
    windows = np.full(len(lens), max(context_len // 2, 1), np.int32)
    return Batch(
        token_ids=np.zeros(num_tokens, np.int64),
        positions=positions,
        slot_mapping=np.full(num_tokens, -1, np.int64),
        query_start_loc=starts,
        seq_lens=context_len + lens,
        block_tables=np.zeros((len(lens), width), np.int32),
        logit_rows=(starts[1:] - 1).astype(np.int64),
        logit_start_loc=np.arange(len(lens) + 1, dtype=np.int32),
        retention=BatchRetention(np.ones_like(windows), windows) if is_cut else None,
    )
