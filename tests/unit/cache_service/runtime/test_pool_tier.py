"""The threads of a pool's tier: they outlive what goes wrong in them, and no other work waits for one that hangs."""

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.tiers.content_tier import ContentTier
from kvkeeper.cache_service.core.tiers.orders import InFlight, Question
from kvkeeper.cache_service.core.values.clock import Clock
from kvkeeper.cache_service.memory.disk.disk_threads import NUM_THREADS
from kvkeeper.cache_service.runtime import pool_tier as pool_tiers
from kvkeeper.cache_service.runtime.pool_tier import Place, PoolTier


class Core:
    """Of a tier with questions alone. answers: what came of them."""

    def __init__(self) -> None:
        self.rules = SimpleNamespace(name="remote")
        self.flight = InFlight(Clock(), 0)
        self.directory = SimpleNamespace(names=set)
        self.loads = SimpleNamespace(take=list)
        self.stores = SimpleNamespace(prepare=lambda _: None)
        self.questions = self
        self.asked: list[Question] = []
        self.answers: asyncio.Queue[int | None] = asyncio.Queue()

    def take(self) -> list[Question]:
        taken, self.asked = self.asked, []
        return taken

    def complete_question(self, _: Question, num_stored: int | None) -> None:
        self.answers.put_nowait(num_stored)


class Where:
    """A place whose answers a test gives."""

    block_bytes = slot_bytes = 1

    def __init__(self) -> None:
        self.facts: dict[str, object] = {}
        self.is_broken = False
        self.ends: list[str] = []  # what was told at the end
        self.has_ended = threading.Event()

    def begin_clearing(self) -> None: ...

    def ask(self, names: Sequence[bytes]) -> int:
        if self.is_broken:
            raise OSError("no process")
        return len(names)

    def write_era(self, era: int) -> bool:
        if era <= NUM_THREADS:
            raise OSError("no process")
        return True

    def close(self) -> None:
        self.ends.append("closed")

    def give_back(self) -> None:
        self.ends.append("given back")
        self.has_ended.set()


def pool_tier(core: Core, where: Where) -> PoolTier:
    manager = cast(PoolManager, SimpleNamespace(state=SimpleNamespace(tick=lambda now: None)))
    hosts = np.zeros((1, 1), np.uint8)
    return PoolTier(manager, cast(ContentTier, core), cast(Place, where), hosts, time.monotonic, where.give_back)


def question() -> Question:
    return Question(0, 0, np.zeros(1, np.int32), 0, [b"a name"], 1, 0, 0.0, 0.0)


async def test_questions_that_fail_are_no_answers_and_end_no_thread() -> None:
    core, where = Core(), Where()
    tier = pool_tier(core, where)
    where.is_broken = True
    core.asked += [question() for _ in range(NUM_THREADS)]
    core.flight.wake()
    async with asyncio.timeout(10):
        assert [await core.answers.get() for _ in range(NUM_THREADS)] == [None] * NUM_THREADS
        where.is_broken = False
        core.asked.append(question())
        core.flight.wake()
        assert await core.answers.get() == 1
    tier.stop()
    tier.close()


async def test_eras_that_cannot_be_written_end_no_thread() -> None:
    core, where = Core(), Where()
    tier = pool_tier(core, where)
    for _ in range(NUM_THREADS + 1):
        core.flight.era += 1
        tier._wake()
        tier._pump()
    async with asyncio.timeout(10):
        await tier._settled.wait()
    tier.stop()
    tier.close()


async def test_a_place_is_closed_once_the_last_thread_has_let_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_tiers, "_CLOSE_SECONDS", 0.0)
    where, may_end = Where(), threading.Event()
    tier = pool_tier(Core(), where)
    tier._threads.do(lambda: None if may_end.wait(10) else where.ends.append("never let go"))
    tier.stop()
    tier.close()
    assert where.ends == []
    may_end.set()
    assert where.has_ended.wait(10)
    assert where.ends == ["closed", "given back"]
