"""SlotDraws: how the next tokens of the requests in slots are drawn, by column, so that a step takes them by array work.

Only of requests whose draws hang on nothing but parameters, seed and position. Slots are those of UnreadTokens. Pure.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ..values.request import Int32Array
from ..values.sampling_params import LIKELIEST, PlainDraws, SampledRows, SamplingParams, draw_params


class _Kind(IntEnum):
    NONE = 0  # its rows are the request's to make
    LIKELIEST = 1
    PLAIN = 2


class SlotDraws:
    """By slot. One that was never set is NONE."""

    def __init__(self) -> None:
        self._kinds = np.zeros(0, np.int8)
        self._params = np.zeros((5, 0))
        self._seeds = np.zeros(0, np.uint64)

    def set(self, slot: int, params: SamplingParams | None, seed: int) -> None:
        """How the slot's request draws. params: None where more than them matters."""
        while slot >= len(self._kinds):
            self._grow(max(16, len(self._kinds)))
        if params is None or params.is_penalised:
            self._kinds[slot] = _Kind.NONE
            return
        self._kinds[slot] = _Kind.LIKELIEST if params.is_likeliest else _Kind.PLAIN
        self._params[:, slot], self._seeds[slot] = draw_params(params), seed

    def rows(self, slots: npt.NDArray[np.int64], positions: Int32Array) -> SampledRows | None:
        """The rows of slots [R] that draw at these positions [R]; None: some are their requests' to make."""
        kinds = self._kinds[slots]
        if not kinds.all():
            return None
        if (kinds == _Kind.LIKELIEST).all():
            return [LIKELIEST] * len(slots)
        zeros = np.zeros(len(slots), np.uint64)  # one continuation each
        return PlainDraws(self._params[:, slots], self._seeds[slots], zeros, positions.astype(np.uint64))

    def _grow(self, num_more: int) -> None:
        self._kinds = np.concatenate((self._kinds, np.zeros(num_more, np.int8)))
        self._params = np.concatenate((self._params, np.zeros((5, num_more))), axis=1)
        self._seeds = np.concatenate((self._seeds, np.zeros(num_more, np.uint64)))
