"""Row 12: a step takes effect exactly once, over gRPC, though requests and replies get lost and are repeated.

Between client and service lies a layer that loses 30 % of the requests, loses 30 % of the replies (some by cancelling the call
on its way), and repeats 50 % of what was answered. All answers to one step must be the same bytes, and the naive model, which
sees each step once, must agree with the pool afterwards.
"""

import asyncio
import contextlib
import random

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import Executor, SessionId
from kvkeeper.client.steps import decode, encode
from tests.soak.row import Counts
from tests.support.worlds.calls_world import CallsWorld
from tests.support.worlds.grpc_driver import DEADLINE, GrpcDriver, LoopThread, step_items, step_reply

LOSS, REPEATS = 0.3, 0.5
_STEPS = 120
_thread: LoopThread | None = None


class LossyDriver(GrpcDriver):
    """A driver with steps that cross the layer."""

    def __init__(self, config: PoolConfig, thread: LoopThread, rng: random.Random) -> None:
        super().__init__(config, thread)
        self.rng = rng
        self.num_lost = self.num_abandoned = self.num_repeats = 0

    def step(self, session: SessionId, batch: StepBatch) -> StepReply:
        live = self._sessions[session]
        items = step_items(batch)
        raw = encode(items, live.session_id, live.epoch, batch.step_id, batch.completed_step_id)
        answers: list[bytes] = []
        delivered = False
        while not delivered:
            if self.rng.random() < LOSS:
                self.num_lost += 1
                continue
            if self.rng.random() < LOSS / 2:
                self.num_abandoned += 1
                self._run(self._abandon(raw))
                continue
            answers.append(self._run(self._send(raw)))
            if self.rng.random() < REPEATS:
                self.num_repeats += 1
                answers.append(self._run(self._send(raw)))
            delivered = self.rng.random() >= LOSS / 2
        assert len(set(answers)) == 1, f"step {batch.step_id} was answered in {len(set(answers))} ways"
        live.step_id = batch.step_id
        reply = step_reply(decode(answers[0]))
        self._last_step[session] = raw, reply
        return reply

    async def _send(self, raw: bytes) -> bytes:
        answer: bytes = await self.api.raw_step(raw, timeout=DEADLINE)
        return answer

    async def _abandon(self, raw: bytes) -> None:
        """The call is given up on its way: its sender cannot know whether it was carried out."""
        call = self.api.raw_step(raw, timeout=DEADLINE)
        for _ in range(self.rng.randrange(12)):
            await asyncio.sleep(0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call


def run(seed: int) -> Counts:
    """Counts steps; faults are losses and repeats."""
    global _thread
    _thread = _thread or LoopThread()
    rng = random.Random(seed)

    def choose(count: int) -> int:
        return int(rng.random() * count)

    config = PoolConfig(
        num_blocks=rng.choice([5, 9, 17]),
        block_size=rng.choice([1, 2, 3, 4]),
        max_sequences=rng.choice([4, 8]),
        max_tokens_per_sequence=rng.choice([12, 24]),
        eviction_policy="lru",  # the model knows its order exactly
    )
    driver = LossyDriver(config, _thread, rng)
    try:
        world = CallsWorld(driver)
        sessions = [world.open(executor) for executor in (Executor.ENGINE, Executor.CACHE)]
        for number in range(_STEPS):
            session = rng.choice(sessions)
            if rng.random() < 0.3:
                world.create(session, choose)
            world.step(session, choose)
            if number % 10 == 0:
                world.compare()
        world.audit()
        world.compare()
        return Counts(_STEPS, min(driver.num_lost, driver.num_abandoned, driver.num_repeats) and
                      driver.num_lost + driver.num_abandoned + driver.num_repeats)  # fmt: skip
    finally:
        driver.close()
