"""Row 8: look-up and pin are one operation. Every interleaving of the calls of two requests, on pools that are too small.

Each request is told at its creation what is cached for it; whether it still is when the request starts depends on the other.
What a start answers as hit must hold the prompt until the request ends: a block that the other one evicted and wrote is a
theft.
"""

import itertools
import random

import numpy as np

from kvkeeper.cache_service.core.values.types import SessionId, StartResult
from tests.soak.row import Counts
from tests.soak.toy_engine import contents
from tests.support.worlds.core_pool import ALL, A, B, CorePool

_CALLS = ("create", "start", "reserve", "commit", "release")


class _Request:
    """One sequence of one session; each call does what it can and nothing where it cannot."""

    def __init__(self, world: "_World", session: SessionId, prompt: list[int]) -> None:
        self.world, self.session, self.prompt = world, session, prompt
        self.num_told = self.hit = self.reserved = 0
        self.state = "new"

    def call(self, name: str) -> None:
        pool = self.world.pool
        if name == "create":
            self.num_told = pool.create(1, self.prompt, session=self.session)
            self.state = "waiting"
        elif name == "start" and self.state == "waiting":
            reply = pool.step(self.session, starts=[(1, 1, ALL)])
            if reply.start_results[0] == StartResult.STARTED:
                self.state, self.hit, self.reserved = "running", int(reply.start_hits[0]), int(reply.start_reserved[0])
                self.world.num_stolen += self.hit < min(
                    self.num_told, (len(self.prompt) - 1) // self.world.size * self.world.size
                )
                self.read(self.hit)
                self.world.write(self, self.hit, self.reserved)
        elif name == "reserve" and self.state == "running":
            reply = pool.step(self.session, reserves=[(1, self.reserved, len(self.prompt))])
            first, self.reserved = self.reserved, max(self.reserved, int(reply.reserve_reserved[0]))
            self.world.write(self, first, self.reserved)
        elif name == "commit" and self.state == "running":
            pool.step(self.session, commits=[(1, self.reserved, [])])
        elif name == "release" and self.state != "new":
            pool.step(self.session, releases=[1])
            pool.step(self.session)
            self.state = "new"

    def read(self, length: int) -> None:
        size = self.world.size
        table = pool_table(self.world.pool, self.session)[: -(-length // size)]
        found = self.world.memory[table].reshape(-1)[:length].tolist()
        assert found == contents("", self.prompt)[:length], f"a theft: the first {length} tokens of {self.session} are gone"


def pool_table(pool: CorePool, session: SessionId) -> list[int]:
    return pool.table(1, session=session)


class _World:
    """A small pool in which something of both prompts is cached."""

    def __init__(self, num_blocks: int, size: int, prompts: list[list[int]], cached: list[int]) -> None:
        self.pool = CorePool(num_blocks, size)
        self.size = size
        self.memory = np.full((num_blocks, size), -1, np.int64)
        self.num_stolen = 0
        for sequence_id, (prompt, length) in enumerate(zip(prompts, cached, strict=True), start=50):
            if length:
                tokens = prompt[:length]
                table = self.pool.prefill(sequence_id, tokens)
                for position, content in enumerate(contents("", tokens)):
                    self.memory[table[position // size], position % size] = content
                self.pool.step(A, releases=[sequence_id])
                self.pool.step(A)
        self.requests = [_Request(self, A, prompts[0]), _Request(self, B, prompts[1])]

    def write(self, request: _Request, first: int, last: int) -> None:
        table = pool_table(self.pool, request.session)
        content = contents("", request.prompt)
        for position in range(first, last):
            self.memory[table[position // self.size], position % self.size] = content[position]

    def check(self) -> None:
        for request in self.requests:
            if request.state == "running":
                request.read(request.reserved)


def run(seed: int) -> Counts:
    """Counts interleavings, all of one small world; the fault is a match that the other request took before the start."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3])
    stem = [rng.randrange(2) for _ in range(6 * size)]
    other = stem if rng.random() < 0.4 else [rng.randrange(2, 4) for _ in stem]
    lengths = [max(1, rng.randint(1, 4) * size + rng.choice([-1, 0, 1])) for _ in range(2)]
    prompts = [stem[: lengths[0]], other[: lengths[1]]]
    cached = [length // size * size for length in lengths]
    num_blocks = max(-(-length // size) for length in lengths) + rng.randint(1, 2)
    num_interleavings = num_stolen = 0
    for places in itertools.combinations(range(2 * len(_CALLS)), len(_CALLS)):
        world = _World(num_blocks, size, prompts, cached)
        turns = [iter(_CALLS), iter(_CALLS)]
        for turn in range(2 * len(_CALLS)):
            who = 0 if turn in places else 1
            world.requests[who].call(next(turns[who]))
            world.check()
        stats = world.pool.manager.queries.stats()
        assert stats.num_referenced_blocks == stats.num_fenced_blocks == 0
        num_interleavings += 1
        num_stolen += world.num_stolen
    return Counts(num_interleavings, num_stolen)
