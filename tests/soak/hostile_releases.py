"""Row 2: double, foreign and hostile releases are refused, and leave no trace.

The hash of the whole core before and after each tells. Valid items stand beside the wrong one, so that half an application
would show.
"""

import random

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.errors import CacheError
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch
from kvkeeper.cache_service.core.values.types import MAX_ID, Executor, SequenceId, SessionId
from tests.soak.row import Counts
from tests.soak.state_hash import state_hash
from tests.support.worlds.cache_api import DEADLINE, Session, le32, le64, refusal, serving
from tests.support.worlds.core_pool import A, B, int32, step_batch

HOSTILE_IDS = (0, -1, -(2**63), 2**63 - 1, MAX_ID, MAX_ID + 1, 2**31, 77)
REFUSALS = {"UNKNOWN_SEQUENCE", "INVALID_FIELD", "UNKNOWN_SESSION", "STALE_EPOCH"}
_NUM_PER_SEED = 500
_NUM_PER_WIRE_SEED = 150


class _Victim:
    """A core with two engines' sequences, some forked, some cached, some in flight, and one that waits."""

    def __init__(self, rng: random.Random) -> None:
        self.manager = PoolManager(
            PoolConfig(17, rng.choice([1, 2, 4]), max_sequences=8, max_tokens_per_sequence=16, watermark=0.0)
        )
        self.step_ids = {A: 0, B: 0}
        for session in self.step_ids:
            self.manager.sessions.open(session, rng.choice(list(Executor)))
        self.ids: dict[SessionId, list[int]] = {A: [1, 2, 3, 4], B: [3, 4, 5]}
        for session, sequence_ids in self.ids.items():
            for sequence_id in sequence_ids[:-1]:
                tokens = int32([rng.randrange(2) for _ in range(rng.choice([3, 4, 5]))])
                self.manager.creation.create(session, SequenceArgs(SequenceId(sequence_id), tokens))
        self.step(A, starts=[(1, 9, 9), (2, 9, 9)])
        self.step(A, commits=[(1, 3, [])], forks=[(1, 4, 3)], reserves=[(4, 5, 5)])
        self.step(B, starts=[(3, 9, 9)])

    def release(self, rng: random.Random, session: SessionId, wrong: list[int], batch: StepBatch) -> None:
        """As a call, or as a step of this session or of none."""
        if len(wrong) == 1 and rng.random() < 0.3:
            self.manager.one_item.release(session, wrong[0])
        else:
            self.manager.steps.step(rng.choice([session, session, SessionId("unknown")]), batch)

    def step(self, session: SessionId, **items: list) -> None:  # type: ignore[type-arg]
        self.manager.steps.step(session, step_batch(self.step_ids[session] + 1, self.step_ids[session], **items))
        self.step_ids[session] += 1


def core(seed: int) -> Counts:
    """Releases as items of a step and as a call of their own."""
    rng = random.Random(seed)
    victim = _Victim(rng)
    before = state_hash(victim.manager)
    for _ in range(_NUM_PER_SEED):
        session, other = rng.choice([(A, B), (B, A)])
        ours, theirs = victim.ids[session], [i for i in victim.ids[other] if i not in victim.ids[session]]
        wrong = rng.choice([[rng.choice(HOSTILE_IDS)], [rng.choice(theirs)], [ours[0]] * 2])
        lawful = [i for i in ours[:2] if i not in wrong]
        rng.shuffle(lawful)
        step_id = victim.step_ids[session] + 1
        batch = step_batch(step_id, step_id - 1, releases=rng.choice([wrong, wrong + lawful, lawful + wrong]))
        with pytest.raises(CacheError) as refused:
            victim.release(rng, session, wrong, batch)
        assert refused.value.reason in REFUSALS
        assert state_hash(victim.manager) == before, f"a refused release of {wrong} left a trace"
    assert victim.manager.queries.check_invariants() == []
    return Counts(_NUM_PER_SEED, _NUM_PER_SEED)


async def wire(seed: int) -> Counts:
    """The same through a channel: steps of one session, calls of another, stale epochs and stolen session ids."""
    rng = random.Random(seed)
    async with serving(num_blocks=17) as api:
        stepping, calling = await api.open(), await api.open(engine=False)
        for session in (stepping, calling):
            await session.create(1, 6)
            await session.create(2, 5)
        await stepping.step(1, start_sequence_ids=le64(1), start_max_new_tokens=le32(9), start_max_hit_tokens=le32(9))
        await stepping.create(3, 7)
        await calling.call("ExtendSequence", sequence_id=1, num_tokens=6)
        await calling.call("CommitSequence", sequence_id=1, num_tokens=6)
        await calling.call("ForkSequence", parent_id=1, child_id=4)
        await calling.call("ReleaseSequence", sequence_id=2)
        (pool,) = api.server.session_manager.registry.pools
        before = state_hash(pool.manager)
        for _ in range(_NUM_PER_WIRE_SEED):
            error = await refusal(_wrong_release(rng, stepping, calling))
            assert error.reason in REFUSALS, error.reason
            assert state_hash(pool.manager) == before
        await api.audit()
    return Counts(_NUM_PER_WIRE_SEED, _NUM_PER_WIRE_SEED)


async def _wrong_release(rng: random.Random, stepping: Session, calling: Session) -> None:
    if rng.random() < 0.5:  # 2 was released before, 3 is the other session's
        wrong = rng.choice([2, 3, *(i for i in HOSTILE_IDS if i >= 0)])
        stolen = rng.choice([{}, {}, {"epoch": stepping.opened.epoch}, {"session_id": "0" * 32}])
        request = pb.ReleaseSequenceRequest(**{**calling.ids, **stolen}, sequence_id=rng.choice([1, 4]) if stolen else wrong)
        await calling.api.stub.ReleaseSequence(request, timeout=DEADLINE)
    else:
        wrong = rng.choice([4, 1, *HOSTILE_IDS])
        twice = rng.random() < 0.3 or wrong == 1
        await stepping.step(2, release_sequence_ids=le64(*([3] if rng.random() < 0.5 else []), wrong, *([wrong] * twice)))
