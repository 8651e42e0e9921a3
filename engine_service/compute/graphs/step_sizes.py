"""The sizes of steps that are captured: how many rows decode, and how many tokens of how many prompts come behind them.

A step takes the next larger size, and its padding costs little: a row without tokens reads nothing. Sizes of steps that only
decode are of eight rows apart, and of sixteen where eight are few beside the others. With prompts a step is longer, so that
fewer sizes are enough.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SMALL = (1, 2, 4)
_STEP, _WIDE_STEP = 8, 16
_WIDE_FROM = 128
MOST_ROWS = 512  # larger batches keep the device busy for longer than the host needs for a plain forward pass
_BESIDE_PROMPTS = (0, 8, 32, 128)  # rows that decode in a step with prompts
_PROMPT_TOKENS = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # beyond, as for MOST_ROWS
MOST_PROMPTS = 64  # in a step


class StepSize(NamedTuple):
    """Rows that decode, tokens of prompts, prompts, and rows of logits."""

    decodes: int
    prompt_tokens: int
    prompts: int
    logits: int


class StepSizes:
    """The sizes for steps of at most so many rows with at most so many tokens of prompts, 0 where these are not captured."""

    def __init__(self, most_rows: int, most_prompt_tokens: int) -> None:
        self.decodes = graph_sizes(most_rows)
        most = self.decodes[-1]
        self._beside = _up_to(_BESIDE_PROMPTS, most)
        self._prompt_tokens = _up_to(_PROMPT_TOKENS, min(most_prompt_tokens, _PROMPT_TOKENS[-1])) if most_prompt_tokens else []
        self._prompts = min(MOST_PROMPTS, most)

    def __iter__(self) -> Iterator[StepSize]:
        """All of them, the largest first."""
        sizes = [self._with_prompts(decodes, tokens) for tokens in self._prompt_tokens for decodes in self._beside]
        sizes += [_only_decodes(decodes) for decodes in self.decodes]
        return iter(sorted(sizes, key=lambda size: size.decodes + size.prompt_tokens, reverse=True))

    def find(self, decodes: int, prompt_tokens: int, prompts: int, logits: int) -> StepSize | None:
        """The smallest that holds so much; None: none does."""
        if not prompts:
            found = size_for(decodes, self.decodes)
            size = None if found is None else _only_decodes(found)
        else:
            beside, tokens = size_for(decodes, self._beside), size_for(prompt_tokens, self._prompt_tokens)
            size = None if beside is None or tokens is None else self._with_prompts(beside, tokens)
            if prompts > self._prompts:
                return None
        return size if size is not None and logits <= size.logits else None

    def _with_prompts(self, decodes: int, tokens: int) -> StepSize:
        logits = size_for(min(decodes + self._prompts, self.decodes[-1]), self.decodes)
        assert logits is not None, "no more than the most"
        return StepSize(decodes, tokens, self._prompts, logits)


def _only_decodes(rows: int) -> StepSize:
    return StepSize(rows, 0, 0, rows)


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    return [size for size in sizes if size < most] + [most]


def graph_sizes(most_rows: int) -> list[int]:
    """Sizes up to `most_rows`, at least 1, itself included, and never above MOST_ROWS. Ascending."""
    most = min(most_rows, MOST_ROWS)
    steps = [*_SMALL, *range(_STEP, _WIDE_FROM, _STEP), *range(_WIDE_FROM, most + 1, _WIDE_STEP)]
    return _up_to(steps, most)


def size_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending sizes that holds so many rows; None: none does."""
    place = bisect.bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None
