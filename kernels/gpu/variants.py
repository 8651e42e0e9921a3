"""Which variant of a kernel a launch takes where the number of its rows decides, and launches that reach all of them.

Plain integers, without Triton: launchers ask which variant it is, and the engine asks before its first step what to run, so
that no variant is compiled while requests wait. A launcher that chooses by numbers of rows has its rule here, beside what
reaches each variant.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .sizes import cdiv, power_of_2

MANY_STORED = 1024  # tokens; from here on a program of store_kv takes several: there are programs enough to fill the device
_FEW_QUERIES, _MANY_QUERIES = 64, 128  # rows of a program of prefill
_MANY_TOKENS = 1024  # of a sequence in a prefill
_GROUP_ROWS = (16, 32, 64, 128)  # rows of a program of grouped_linear
MOST_SPLITS = 16  # of a product over its inputs
_ENOUGH_PROGRAMS = {16: 384, 32: 384, 64: 384, 128: 256}  # by rows: three or two to a multiprocessor
_FEWEST_SLABS = 8  # of a split


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """A program of paged_attention_prefill: rows of queries, tokens of a tile of keys, warps, and stages of its loop."""

    rows: int
    tile: int
    warps: int
    stages: int


def prefill_shape(num_tokens: int, num_seqs: int, group: int, dims: int, *, is_plain: bool, is_crowded: bool) -> PrefillShape:
    """The shape for so many tokens of so many sequences, with `group` rows of each token and heads of `dims` elements.

    Up to 128 elements, the fastest of 13 shapes on an H200, see docs/gpu: small programs, of which several fit a
    multiprocessor, and large ones for heads of 128 where sequences have many tokens, without a window or capped scores
    (is_plain), whose registers would spill. Beyond, as many rows as two groups of four warps multiply at once; half of them
    where each sequence has few, and, over as many warps, where a row has both caps and sinks (is_crowded), for the same reason.
    Beyond 256, half of them always, and tiles of half as many keys: what a program holds grows with the head.
    """
    if dims > 256:
        return PrefillShape(max(_FEW_QUERIES, power_of_2(group)), 16, 8, 5)
    if dims > 128:
        is_half = is_crowded or num_tokens * group <= _FEW_QUERIES * num_seqs
        rows = max(_FEW_QUERIES if is_half else _MANY_QUERIES, power_of_2(group))
        return PrefillShape(rows, 32, 4 if rows == _FEW_QUERIES and not is_crowded else 8, 5)
    if dims == 128 and num_tokens >= _MANY_TOKENS * num_seqs and is_plain:
        return PrefillShape(max(_MANY_QUERIES, power_of_2(group)), 128, 8, 2)
    rows = max(_FEW_QUERIES, power_of_2(group))
    return PrefillShape(rows, 64, 4 if rows == _FEW_QUERIES else 8, 2)


def prefill_lens(groups: Iterable[int]) -> list[int]:
    """Numbers of tokens, of one sequence alone, that between them have all shapes that prefill_shape gives for these groups.

    Each is the least one with its shape, and so has the fewest programs: if any launch with this shape is split over the keys,
    it is, behind as many of them. A sequence has two tokens or more: one with a single token decodes. Two are enough for
    stored K and V and for latents, whose programs have the same shape for any number of tokens.
    """
    return sorted({2, _MANY_TOKENS} | {max(_FEW_QUERIES // group + 1, 2) for group in groups})


def group_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a program of grouped_linear: their mean of a group, up to a power of two."""
    return min(max(power_of_2(cdiv(num_rows, num_groups)), _GROUP_ROWS[0]), _GROUP_ROWS[-1])


def group_tokens(num_groups: int, rows_per_token: int) -> list[int]:
    """The fewest tokens for each number of rows that group_rows gives, where each token has so many rows."""
    return [1, *(rows * num_groups // rows_per_token + 1 for rows in _GROUP_ROWS[:-1])]


def num_splits(rows: int, num_programs: int, num_slabs: int) -> int:
    """Parts of the inputs of a product whose tiles have so many rows. If any number of rows has several, one row has."""
    return max(min(_ENOUGH_PROGRAMS[rows] // num_programs, num_slabs // _FEWEST_SLABS, MOST_SPLITS), 1)
