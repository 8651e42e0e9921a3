"""PenalisedRows: the rows of a step whose draws hang on the tokens before them, by column. Pure.

A row's history is named, not copied: it is the start of a row of a table of tokens, which many of the loop's rows share. The
token that the step before draws is not in it yet; where the model computes, it is known under its row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .sampling_params import SamplingParams, SamplingRow

NOTHING_AWAITED = -1


@dataclass(frozen=True, slots=True, eq=False)
class PenalisedRows:
    """P rows.

    Attributes:
        where: int64 [P], their rows of the logits.
        penalties: float32 [3, P], the columns repetition, frequency, presence; see SamplingParams.
        tokens: int32 [N, W], tokens of sequences; which [P]: the row of each; num_known [P]: how many of it are there.
        num_prompts: int64 [P], how many of them are the prompt's.
        awaited: int64 [P], the row for which the step before draws one token more, or NOTHING_AWAITED.
        serials: int64 [P], of each sequence while it has its row of `tokens`: its tokens only grow under it. None: not told.
    """

    where: npt.NDArray[np.int64]
    penalties: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    which: npt.NDArray[np.int64]
    num_known: npt.NDArray[np.int64]
    num_prompts: npt.NDArray[np.int64]
    awaited: npt.NDArray[np.int64]
    serials: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(cls, rows: Sequence[SamplingRow]) -> "PenalisedRows":
        """Those of the rows that have a penalty, with a table of their own."""
        where = [at for at, row in enumerate(rows) if row.params.is_penalised]
        chosen = [rows[at] for at in where]
        lens = np.array([len(row.token_ids) for row in chosen], np.int64)
        tokens = np.zeros((len(chosen), int(lens.max(initial=0))), np.int32)
        for own, row in zip(tokens, chosen, strict=True):
            own[: len(row.token_ids)] = row.token_ids
        awaited = [NOTHING_AWAITED if row.awaited_row is None else row.awaited_row for row in chosen]
        return cls(
            where=np.array(where, np.int64),
            penalties=np.array([penalties_of(row.params) for row in chosen], np.float32).reshape(-1, 3).T.copy(),
            tokens=tokens,
            which=np.arange(len(chosen), dtype=np.int64),
            num_known=lens,
            num_prompts=np.array([row.num_prompt_tokens for row in chosen], np.int64),
            awaited=np.array(awaited, np.int64),
        )

    @property
    def lens(self) -> npt.NDArray[np.int64]:
        """int64 [P], tokens of each, with the one that is awaited."""
        return self.num_known + (self.awaited != NOTHING_AWAITED)

    def histories(self) -> npt.NDArray[np.int32]:
        """The tokens of all, one row behind the other; a zero stands for what is awaited."""
        lens = self.lens
        places = np.arange(int(lens.max(initial=0)))
        known = np.zeros((len(lens), len(places)), np.int32)
        width = min(len(places), self.tokens.shape[1])
        known[:, :width] = self.tokens[self.which, :width]
        if (is_awaited := self.awaited != NOTHING_AWAITED).any():
            known[is_awaited, self.num_known[is_awaited]] = 0
        return known[places < lens[:, None]]

    def __len__(self) -> int:
        return len(self.where)


def penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    """As PenalisedRows has them."""
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty
