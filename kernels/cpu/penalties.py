"""Penalties of sampling, compiled: one walk over each row's history."""

import numpy as np
import numpy.typing as npt
import torch

from .launch import Launcher

_penalise = Launcher("penalise", "q" * 12)
_IN_ONE_THREAD = 0  # a history is short beside what waking threads takes

Int64s = npt.NDArray[np.int64]


def penalise(
    logits: torch.Tensor,
    where: Int64s,
    penalties: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int32],
    which: Int64s,
    num_known: Int64s,
    num_prompts: Int64s,
    awaited: Int64s,
) -> None:
    """Change logits, contiguous float32 [S, V], in place, as engine_service.compute.penalties says.

    where: [P] rows of the logits. penalties: [3, P], repetition, frequency, presence. tokens: [N, W], whose rows `which` [P]
    begin with num_known [P] tokens, num_prompts [P] of them the prompt's. awaited: [P], one token more, or negative.
    """
    columns = [np.ascontiguousarray(each) for each in (where, penalties, which, num_known, num_prompts, awaited)]
    counts = np.zeros(logits.shape[1], np.int32)
    where_at, penalties_at, which_at, known_at, prompts_at, awaited_at = (each.ctypes.data for each in columns)
    assert tokens.strides[1] == tokens.itemsize or tokens.shape[1] < 2, "a row lies together"
    _penalise(
        _IN_ONE_THREAD,
        logits.data_ptr(),
        logits.shape[1],
        len(where),
        where_at,
        penalties_at,
        tokens.ctypes.data,
        tokens.strides[0] // tokens.itemsize,
        which_at,
        known_at,
        prompts_at,
        awaited_at,
        counts.ctypes.data,
    )
