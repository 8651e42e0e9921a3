"""SlotDraws: how the next tokens of the requests in slots are drawn, by column, so that a step takes them by array work.

Only of requests whose draws depend on nothing but parameters, seed, position and the tokens before. Slots are those of
UnreadTokens. Pure.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..values.sampling_params import (
    LIKELIEST,
    NOTHING_AWAITED,
    PenalisedRows,
    PlainDraws,
    SampledRows,
    SamplingParams,
    draw_params,
    penalties_of,
)


class _Kind(IntEnum):
    NONE = 0  # its rows are the request's to make
    LIKELIEST = 1
    PLAIN = 2
    PENALISED = 3


class Histories(NamedTuple):
    """The tokens of R rows that draw, see PenalisedRows. awaited [R]: whether the step before draws one more."""

    tokens: npt.NDArray[np.int32]
    which: npt.NDArray[np.intp]
    num_known: npt.NDArray[np.integer]
    num_prompts: npt.NDArray[np.integer]
    awaited: npt.NDArray[np.bool_]
    serials: npt.NDArray[np.int64]


class SlotDraws:
    """The draws by slot. A slot that was never set is NONE."""

    def __init__(self) -> None:
        self._kinds = np.zeros(0, np.int8)
        self._params = np.zeros((5, 0))
        self._penalties = np.zeros((3, 0), np.float32)
        self._seeds = np.zeros(0, np.uint64)

    def set(self, slot: int, params: SamplingParams | None, seed: int) -> None:
        """How the slot's request draws. params: None where more than them matters."""
        while slot >= len(self._kinds):
            self._grow(max(16, len(self._kinds)))
        if params is None:
            self._kinds[slot] = _Kind.NONE
            return
        self._kinds[slot] = _Kind.LIKELIEST if params.is_likeliest else _Kind.PLAIN
        if params.is_penalised:
            self._kinds[slot], self._penalties[:, slot] = _Kind.PENALISED, penalties_of(params)
        self._params[:, slot], self._seeds[slot] = draw_params(params), seed

    def rows(self, slots: npt.NDArray[np.int64], histories: Histories) -> SampledRows | None:
        """The rows of slots [R] that draw behind these tokens; None: some are their requests' to make."""
        kinds = self._kinds[slots]
        if not kinds.all():
            return None
        if (kinds == _Kind.LIKELIEST).all():
            return [LIKELIEST] * len(slots)
        zeros = np.zeros(len(slots), np.uint64)  # one continuation each
        positions = (histories.num_known + histories.awaited).astype(np.uint64)
        penalised = self._penalised(slots, np.flatnonzero(kinds == _Kind.PENALISED), histories)
        return PlainDraws(self._params[:, slots], self._seeds[slots], zeros, positions, penalised)

    def _penalised(
        self, slots: npt.NDArray[np.int64], where: npt.NDArray[np.intp], histories: Histories
    ) -> PenalisedRows | None:
        if not len(where):
            return None
        which = histories.which[where]
        return PenalisedRows(
            where=where,
            penalties=self._penalties[:, slots[where]],
            tokens=histories.tokens,
            which=which,
            num_known=histories.num_known[where].astype(np.int64),
            num_prompts=histories.num_prompts[where].astype(np.int64),
            awaited=np.where(histories.awaited[where], which, NOTHING_AWAITED),
            serials=histories.serials[where],
        )

    def _grow(self, num_more: int) -> None:
        self._kinds = np.concatenate((self._kinds, np.zeros(num_more, np.int8)))
        self._params = np.concatenate((self._params, np.zeros((5, num_more))), axis=1)
        self._penalties = np.concatenate((self._penalties, np.zeros((3, num_more), np.float32)), axis=1)
        self._seeds = np.concatenate((self._seeds, np.zeros(num_more, np.uint64)))
