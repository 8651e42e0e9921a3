"""Sampling parameters: how a request's next token is drawn, and the rows of a step with all that their draws depend on. Pure.

A row is one object, or a place in columns: PlainDraws has the rows of a step, and PenalisedRows those of them whose draws
depend on the tokens before. A penalised row's history is named, not copied: it is the start of a row of a table of tokens,
which many of the loop's rows share. The token that the step before draws is not in it yet; where the model computes, it is
known under its row. A beam search has rows of its own, which candidates come back for, and branches follow from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .token_rules import TokenRules

NOTHING_AWAITED = -1


class SamplingParamsError(ValueError):
    """A sampling parameter is out of range."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} must be {allowed}, is {value!r}")
        self.field = field
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row's next token is drawn; by default from the model's own distribution.

    Attributes:
        temperature: 0 to 100; 0: the likeliest token (greedy), and the filters below do not apply.
        top_p: (0, 1], 1: off. top_k: >= 0, 0: off. min_p: [0, 1], 0: off. typical_p: (0, 1], 1: off.
        repetition_penalty: (0, 10], 1: off; divides positive and multiplies negative logits of every token of prompt and
            output (arXiv 1909.05858).
        frequency_penalty, presence_penalty: -2 to 2, 0: off; subtracted per occurrence, and once, in the output.

    Raises:
        SamplingParamsError: out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        self._check("temperature", self.temperature == 0 or 1e-3 <= self.temperature <= 100, "0, or 0.001 to 100")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("top_k", 0 <= self.top_k < 2**31 and self.top_k == int(self.top_k), "an integer of at least 0")
        self._check("min_p", 0 <= self.min_p <= 1, "0 to 1")
        self._check("typical_p", 0 < self.typical_p <= 1, "above 0 and at most 1")
        self._check("repetition_penalty", 0 < self.repetition_penalty <= 10, "above 0 and at most 10")
        self._check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2")
        self._check("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2")

    @property
    def is_likeliest(self) -> bool:
        """Whether they ask for the likeliest token, whatever came before."""
        return self.temperature == 0 and not self.is_penalised

    @property
    def is_penalised(self) -> bool:
        """Whether tokens that came before count."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def _check(self, field: str, allowed: bool, text: str) -> None:  # comparisons with NaN are false, so it is refused
        if not allowed:
            raise SamplingParamsError(field, getattr(self, field), text)


_LEAST_TEMPERATURE = 1e-3  # below it the distribution is the likeliest token to float precision
NEUTRAL = SamplingParams()
GREEDY = SamplingParams(temperature=0)


def with_fields(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    """The defaults but for what is given, in the bounds of a request. Raises SamplingParamsError."""
    if 0 < given.get("temperature", 0) < _LEAST_TEMPERATURE:
        given = {**given, "temperature": _LEAST_TEMPERATURE}
    if not 0 <= given.get("min_p", 0) < 1:
        raise SamplingParamsError("min_p", given["min_p"], "0 to below 1")
    return replace(defaults, **given)


class Allowing(Protocol):
    """Says which tokens may come next."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[vocab_size]; none where nothing can."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRow:
    """One row to sample.

    Attributes:
        seed: of the request, 0 <= seed < 2^64.
        sample_idx: which of the request's n samples.
        token_ids: int [position], prompt and output so far, without the token that is awaited.
        num_prompt_tokens: how many of them are the prompt's.
        num_logprobs: how many likeliest tokens to return beside the one drawn; None: return no log probabilities.
        constraint: what may be drawn; None: any token.
        awaited_row: the row for which the step before draws a token that stands behind token_ids; None: nothing is awaited.
        rules: what else is said of single tokens; None: nothing.
    """

    params: SamplingParams
    seed: int
    sample_idx: int
    token_ids: npt.NDArray[np.integer]
    num_prompt_tokens: int
    num_logprobs: int | None = None
    constraint: Allowing | None = None
    awaited_row: int | None = None
    rules: TokenRules | None = None

    @property
    def output(self) -> npt.NDArray[np.integer]:
        """Those of token_ids that are not the prompt's."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def depends_on_awaited(self) -> bool:
        """Whether what may be drawn follows from the token that is awaited."""
        looks_back = self.rules is not None and any(len(word) > 1 for word in self.rules.bad_words)
        return self.awaited_row is not None and (self.params.is_penalised or looks_back)

    @property
    def position(self) -> int:
        """The position of the token that is drawn."""
        return len(self.token_ids) + (self.awaited_row is not None)


# In the place of every row whose token is the likeliest, whatever came before, and of which nothing else is returned. It
# needs no history, and is found again by identity.
LIKELIEST = SamplingRow(GREEDY, 0, 0, np.empty(0, np.int32), 0)


@dataclass(frozen=True, slots=True, eq=False)
class PenalisedRows:
    """P rows.

    Attributes:
        where: int64 [P], their rows of the logits.
        penalties: float32 [3, P], the columns repetition, frequency, presence; see SamplingParams.
        tokens: int32 [N, W], tokens of sequences; which [P]: the row of each; num_known [P]: how many of it are there.
        num_prompts: int64 [P], how many of them are the prompt's.
        awaited: int64 [P], the row for which the step before draws one token more, or NOTHING_AWAITED.
        serials: int64 [P], of each sequence while it has its row of `tokens`: its tokens only grow under it. None: not given.
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
            penalties=np.array([get_penalties(row.params) for row in chosen], np.float32).reshape(-1, 3).T.copy(),
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


def get_penalties(params: SamplingParams) -> tuple[float, float, float]:
    """As PenalisedRows has them."""
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


@dataclass(frozen=True, slots=True, eq=False)
class PlainDraws:
    """R rows to sample by column: their draws depend on logits, parameters, seed, position and history alone.

    Attributes:
        params: float64 [5, R], the columns temperature, top_k, top_p, min_p, typical_p.
        seeds, sample_idx, positions: uint64 [R], see SamplingRow.
        penalised: those of them whose logits are to be penalised first; None: none are.
    """

    params: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    sample_idx: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint64]
    penalised: PenalisedRows | None = None

    @classmethod
    def of(cls, rows: Sequence[SamplingRow]) -> "PlainDraws":
        """What is left of rows once penalties and constraints were applied to their logits."""
        columns = np.array([draw_params(row.params) for row in rows], np.float64).reshape(-1, 5).T
        numbers = np.array([(row.seed, row.sample_idx, row.position) for row in rows], np.uint64).reshape(-1, 3).T
        return cls(columns, *numbers)

    def __len__(self) -> int:
        return len(self.seeds)

    def picked(self, at: npt.NDArray[np.intp]) -> "PlainDraws":
        """Some of the rows."""
        return PlainDraws(self.params[:, at], self.seeds[at], self.sample_idx[at], self.positions[at])


def draw_params(params: SamplingParams) -> tuple[float, float, float, float, float]:
    """As PlainDraws has them."""
    return params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p


SampledRows = Sequence[SamplingRow] | PlainDraws


def as_plain(rows: SampledRows) -> PlainDraws | None:
    """The rows by column; None: what was drawn before counts, or what may be drawn is said elsewhere, or all are LIKELIEST."""
    if isinstance(rows, PlainDraws):
        return rows if rows.penalised is None else None
    if are_likeliest(rows) or any(
        row.params.is_penalised or row.constraint is not None or row.rules is not None for row in rows
    ):
        return None
    return PlainDraws.of(rows)


def are_likeliest(rows: SampledRows) -> bool:
    """Whether all rows are LIKELIEST."""
    return not isinstance(rows, PlainDraws) and rows.count(LIKELIEST) == len(rows)


@dataclass(frozen=True, slots=True, eq=False)
class SearchRow:
    """One list: its parameters and tokens, and how many candidates are wanted."""

    row: SamplingRow
    num_candidates: int


class Candidates(NamedTuple):
    """A list's likeliest next tokens and their log probabilities, the likeliest first."""

    token_ids: list[int]
    logprobs: list[float]


class Branch(NamedTuple):
    """The list in `slot` is from now on the one that was in `parent`, and this token behind it."""

    parent: int
    slot: int
    token_id: int
