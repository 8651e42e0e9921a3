"""Steps that the protocol refuses, each with one thing wrong and valid items beside it.

Owns the list of defects. Each answers the columns of the wrong item and the reasons it may be refused with, or None where
the world has nothing to do it with. The valid items would change state, so that half an application shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvkeeper.cache_service.core.values.step_columns import StepBatch
from kvkeeper.cache_service.core.values.types import MAX_ID, Executor, SessionId
from tests.support.reference.naive_cache import NaiveSequence
from tests.support.worlds.engine_model import Choose, int32, int64
from tests.support.worlds.world import World

T = TypeVar("T")
Columns = dict[str, Any]
Defect = tuple[Columns, tuple[str, ...]] | None


@dataclass(frozen=True)
class Scene:
    """What a defect is made of: the session's sequences, and the step up to which its device work is said to be done."""

    running: list[NaiveSequence]
    waiting: list[NaiveSequence]
    completed: int
    choose: Choose
    block_size: int
    num_usable_blocks: int

    def any(self, options: list[T]) -> T:
        return options[self.choose(len(options))]


INVALID = ("INVALID_FIELD",)
UNKNOWN = ("UNKNOWN_SEQUENCE",)


def refuse_step(world: World, session: SessionId, choose: Choose) -> bool:
    """Sends one wrong step; it must be refused without a trace. False where there is nothing to do it with."""
    engine = world.engines[session]
    ours = world.naive.of(session)
    lag = choose(2) if engine.executor is Executor.ENGINE and engine.step_id else 0
    completed = max(engine.completed, engine.step_id - lag)
    running, waiting = [q for q in ours if q.running], [q for q in ours if not q.running]
    scene = Scene(running, waiting, completed, choose, world.config.block_size, world.config.num_usable_blocks)
    defect = scene.any(DEFECTS)(scene)
    if defect is None:
        return False
    columns, reasons = defect
    batch = StepBatch(step_id=engine.step_id + 1, completed_step_id=completed, **columns)
    world.refused_with(reasons, lambda: world.driver.step(session, _beside(batch, scene)))
    return True


def _beside(batch: StepBatch, scene: Scene) -> StepBatch:
    """Adds valid items on sequences that the wrong one does not name."""
    columns = [getattr(batch, name) for name in batch._fields if name.endswith(("ids", "parents", "children"))]
    named = {int(i) for column in columns for i in column}
    spare = [q for q in scene.running if q.sequence_id not in named]
    idle = [q for q in scene.waiting if q.sequence_id not in named]
    if spare and not len(batch.reserve_ids):
        most = [min(q.max_tokens, q.reserved + 1) for q in spare]
        batch = batch._replace(reserve_ids=int64([q.sequence_id for q in spare]), reserve_min=int32([1] * len(spare)),
                        reserve_max=int32(most))  # fmt: skip
    elif spare and not len(batch.release_ids):
        batch = batch._replace(release_ids=int64([spare[0].sequence_id]))
    if idle and not len(batch.start_ids):
        batch = batch._replace(start_ids=int64([q.sequence_id for q in idle]), start_max_new=int32([1] * len(idle)),
                        start_max_hit=int32([99] * len(idle)))  # fmt: skip
    return batch


def _commit(sequence_id: int, length: int, new: list[int], num_new: int | None = None) -> Columns:
    return {
        "commit_ids": int64([sequence_id]),
        "commit_lens": int32([length]),
        "commit_num_new": int32([len(new) if num_new is None else num_new]),
        "commit_tokens": int32(new),
    }


def _fork(parent: int, child: int, length: int) -> Columns:
    return {"fork_parents": int64([parent]), "fork_children": int64([child]), "fork_lens": int32([length])}


def _truncate(ids: list[int], lengths: list[int]) -> Columns:
    return {"truncate_ids": int64(ids), "truncate_lens": int32(lengths)}


def _start(ids: list[int], max_new: int = 1, max_hit: int = 0) -> Columns:
    count = len(ids)
    return {"start_ids": int64(ids), "start_max_new": int32([max_new] * count), "start_max_hit": int32([max_hit] * count)}


def _reserve(ids: list[int], least: int, most: int) -> Columns:
    count = len(ids)
    return {"reserve_ids": int64(ids), "reserve_min": int32([least] * count), "reserve_max": int32([most] * count)}


def _unknown(scene: Scene) -> Defect:
    """An unknown id, id 0, a negative and a huge one, in every list."""
    unknown = scene.any([MAX_ID, 0, -1, -(2**63), 2**63 - 1])
    lists: list[Columns] = [
        _commit(unknown, 1, []),
        _fork(unknown, MAX_ID - 1, 1),
        _truncate([unknown], [1]),
        {"release_ids": int64([unknown])},
        _start([unknown]),
        _reserve([unknown], 1, 1),
    ]
    return scene.any(lists), (*UNKNOWN, *INVALID)


def _twice(scene: Scene) -> Defect:
    """One sequence two times in one list."""
    if scene.waiting and scene.choose(2):
        return _start([scene.waiting[0].sequence_id] * 2), INVALID
    if not scene.running:
        return None
    twice = [scene.running[0].sequence_id] * 2
    committed = scene.running[0].committed
    lists: list[Columns] = [
        {"commit_ids": int64(twice), "commit_lens": int32([committed] * 2), "commit_num_new": int32([0, 0])},
        _truncate(twice, [1, 1]),
        {"release_ids": int64(twice)},
        _reserve(twice, 1, 1),
    ]
    return scene.any(lists), INVALID


def _wrong_state(scene: Scene) -> Defect:
    if scene.running and scene.choose(2):
        return _start([scene.running[0].sequence_id]), ("WRONG_STATE",)
    if not scene.waiting:
        return None
    q = scene.waiting[0].sequence_id
    lists = [_commit(q, 0, []), _fork(q, MAX_ID, 1), _truncate([q], [1]), _reserve([q], 1, 1),
             {**_start([q]), **_reserve([q], 1, 1)}]  # fmt: skip
    return scene.any(lists), ("WRONG_STATE",)


def _commit_out_of_bounds(scene: Scene) -> Defect:
    """Past what is reserved, past what is known, shrinking, or with tokens that do not add up."""
    if not scene.running:
        return None
    q = scene.any(scene.running)
    known, i = len(q.tokens), q.sequence_id
    wrong = [
        _commit(i, q.reserved + 1, [0] * max(0, min(q.reserved + 1, q.max_tokens) - known)),
        _commit(i, max(known, q.reserved) + 1, []),
        _commit(i, -1, []),
        _commit(i, 2**31 - 1, []),
        _commit(i, q.committed, [0], num_new=2),
        _commit(i, q.committed, [0], num_new=-1),
        _commit(i, q.committed, [0] * (q.max_tokens - known + 1)),
        {"commit_tokens": int32([1])},
    ]
    if q.committed:
        wrong.append(_commit(i, q.committed - 1, []))
    if known < q.max_tokens:
        wrong.append(_commit(i, q.committed, [-1]))
    return scene.any(wrong), INVALID


def _commit_of_what_still_runs(scene: Scene) -> Defect:
    """Past what was reserved as of the completed step, though reserved and known."""
    bounds = {q.sequence_id: q.granted_as_of(scene.completed) for q in scene.running}
    early = [q for q in scene.running if bounds[q.sequence_id] < q.reserved]
    if not early:
        return None
    q = scene.any(early)
    length = bounds[q.sequence_id] + 1
    return _commit(q.sequence_id, length, [0] * max(0, length - len(q.tokens))), INVALID


def _fork_wrong(scene: Scene) -> Defect:
    """More tokens than committed, none, or a child that is there already or has no valid id."""
    parents = [q for q in scene.running if q.committed]
    if not parents:
        return None
    q = parents[0]
    other = scene.any(scene.running + scene.waiting).sequence_id
    wrong: list[tuple[Columns, tuple[str, ...]]] = [
        (_fork(q.sequence_id, MAX_ID, q.committed + 1), INVALID),
        (_fork(q.sequence_id, MAX_ID, 0), INVALID),
        (_fork(q.sequence_id, MAX_ID, -1), INVALID),
        (_fork(q.sequence_id, 0, 1), INVALID),
        (_fork(q.sequence_id, -1, 1), INVALID),
        (_fork(q.sequence_id, MAX_ID + 1, 1), INVALID),
        (_fork(q.sequence_id, other, 1), ("DUPLICATE_SEQUENCE",)),
        ({**_fork(q.sequence_id, other, 1), "release_ids": int64([other])}, ("DUPLICATE_SEQUENCE",)),
    ]
    return scene.any(wrong)


def _cut_into_holes(scene: Scene) -> Defect:
    """A fork or a truncate with a window that would need what retention has dropped."""
    cuts = [(q, length) for q in scene.running for length in range(1, q.committed)
            if not q.can_be_cut(length, scene.block_size)]  # fmt: skip
    if not cuts:
        return None
    q, length = scene.any(cuts)
    return scene.any([_fork(q.sequence_id, MAX_ID, length), _truncate([q.sequence_id], [length])]), INVALID


def _more_than_the_pool(scene: Scene) -> Defect:
    """A reservation of a sequence with retention that no eviction can make room for."""
    for q in scene.running:
        limit = (scene.num_usable_blocks + q.table.count(0)) * scene.block_size
        if q.max_tokens > limit:
            return _reserve([q.sequence_id], limit + 1, q.max_tokens), INVALID
    return None


def _lengths_wrong(scene: Scene) -> Defect:
    """Truncates, starts and reservations with impossible lengths."""
    if scene.waiting and scene.choose(2):
        q = scene.waiting[0].sequence_id
        return (_start([q], max_new=-scene.choose(2)), INVALID) if scene.choose(2) else (_start([q], max_hit=-1), INVALID)
    if not scene.running:
        return None
    q, limit = scene.running[0].sequence_id, scene.running[0].max_tokens
    wrong = [_truncate([q], [0]), _truncate([q], [-5]), _reserve([q], 0, 1), _reserve([q], 2, 1),
             _reserve([q], 1, limit + 1), _reserve([q], 1, 2**31 - 1)]  # fmt: skip
    return scene.any(wrong), INVALID


def _released(scene: Scene) -> Defect:
    """Released in this step, and wanted after it."""
    if scene.waiting and scene.choose(2):
        q = scene.waiting[0].sequence_id
        return {"release_ids": int64([q]), **_start([q])}, UNKNOWN
    if not scene.running:
        return None
    q = scene.running[0].sequence_id
    return {"release_ids": int64([q]), **_reserve([q], 1, 1)}, UNKNOWN


DEFECTS: list[Callable[[Scene], Defect]] = [
    _unknown,
    _twice,
    _wrong_state,
    _commit_out_of_bounds,
    _commit_of_what_still_runs,
    _fork_wrong,
    _cut_into_holes,
    _more_than_the_pool,
    _lengths_wrong,
    _released,
]
