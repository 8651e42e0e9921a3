"""Whether a request is the step that was foretold, which its bytes tell: columns are compared, not read.

A request that is anything else, a wrong one too, is left to the usual way, which has the words for what is wrong.
"""

from typing import Any

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.step.forecast import Forecast
from ..core.values.step_columns import BATCH_COLUMNS, StepBatch
from .convert.step import RawColumns, raw_columns, step_batch

_FIRST = len(StepBatch._fields) - len(BATCH_COLUMNS)  # place in StepBatch of its first column
_NAMES = [column.name for column in BATCH_COLUMNS]
_TOKENS, _RELEASES, _STARTS = (_NAMES.index(name) for name in ("commit_tokens", "release_ids", "start_ids"))


def _places_of(*lists: str) -> tuple[int, ...]:
    """Places in BATCH_COLUMNS of the columns of these lists."""
    return tuple(place for place, column in enumerate(BATCH_COLUMNS) if column.list in lists)


# A forecast says what is committed, but for the tokens, and what is reserved. It leaves open what is released and started.
_COMMITS = tuple(place for place in _places_of("commit") if place != _TOKENS)
_RESERVES = _places_of("reserve")
_OTHERS = tuple(place for place in range(len(_NAMES)) if place not in _places_of("commit", "reserve", "release", "start"))


def foretold_step(request: pb.StepRequest, forecast: Forecast) -> tuple[StepBatch, Forecast] | None:
    """The batch of a request that is as foretold, and the forecast with its releases; None of any other request.

    Raises InvalidField for releases or starts whose columns do not fit.
    """
    batch, raws = forecast.batch, raw_columns(request)
    if request.step_id != batch.step_id or request.completed_step_id != batch.completed_step_id:
        return None
    if not _agree(raws, batch, _COMMITS) or any(raws[place] for place in _OTHERS):
        return None
    if len(raws[_TOKENS]) != batch.commit_tokens.nbytes or int((tokens := np.frombuffer(raws[_TOKENS], "<i4")).min()) < 0:
        return None
    if not raws[_RELEASES] and not raws[_STARTS]:
        return (batch._replace(commit_tokens=tokens), forecast) if _agree(raws, batch, _RESERVES) else None
    told = step_batch(request)
    without = forecast.without(told.release_ids) if len(told.release_ids) else forecast
    return (told, without) if without is not None and _agree(raws, without.batch, _RESERVES) else None


def _agree(raws: RawColumns, batch: StepBatch, places: tuple[int, ...]) -> bool:
    columns: tuple[Any, ...] = batch
    return all(raws[place] == columns[_FIRST + place].tobytes() for place in places)
