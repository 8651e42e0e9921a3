"""Row 32: a reused block shows nothing of another tenant.

Every tenant fills its blocks, to the last byte, with a number of its own. What a session is granted is looked at where it lies,
before anything is written to it, and may hold zeros and the tenant's own number and nothing else.
"""

import random

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.soak.row import Counts
from tests.support.worlds.cache_api import BLOCK_SIZE, Api, Session, blocks_of, int32s, le32, le64, serving

TENANTS = {"red": 0xA1, "green": 0xB2, "blue": 0xC3}
_NUM_BLOCKS = 33
_ROUNDS = 300


class _Reader:
    """One session, of either executor, that starts, forks and ends sequences of any tenant."""

    def __init__(self, session: Session, is_engine: bool, blocks: np.ndarray, rng: random.Random) -> None:
        self.session, self.is_engine, self.blocks, self.rng = session, is_engine, blocks, rng
        self.live: dict[int, tuple[str, int]] = {}  # sequence: tenant, tokens
        self.step_id = 0
        self._next_id = 0

    async def start(self) -> int:
        """Starts a sequence. Returns how many blocks it got that had been full of another tenant's number."""
        tenant = self.rng.choice(list(TENANTS))
        self._next_id += 1
        num_tokens = self.rng.randint(1, 5) * BLOCK_SIZE + self.rng.choice([-1, 0, 1])
        first = self.rng.randrange(3)  # some prefixes are hit
        await self.session.create(self._next_id, num_tokens, first=first, tenant=tenant)
        before = self.blocks.copy()
        reply = await self.step(start_sequence_ids=le64(self._next_id), start_max_new_tokens=le32(64),
                                start_max_hit_tokens=le32(64))  # fmt: skip
        granted = int32s(reply.start_block_ids)
        if granted:
            self.live[self._next_id] = tenant, min(num_tokens, int32s(reply.start_num_reserved_tokens)[0])
        else:
            await self.step(release_sequence_ids=le64(self._next_id))
        return self.check(tenant, granted, before)

    async def fork(self) -> int:
        """A child that grows, so that a shared block is copied."""
        parent, (tenant, num_tokens) = self.rng.choice(list(self.live.items()))
        self._next_id += 1
        before = self.blocks.copy()
        reply = await self.step(
            commit_sequence_ids=le64(parent), commit_num_tokens=le32(num_tokens), commit_num_new_tokens=le32(0),
            fork_parent_ids=le64(parent), fork_child_ids=le64(self._next_id), fork_num_tokens=le32(num_tokens),
            reserve_sequence_ids=le64(self._next_id), reserve_min_tokens=le32(1), reserve_max_tokens=le32(num_tokens + 5),
        )  # fmt: skip
        self.live[self._next_id] = tenant, num_tokens
        found = int32s(reply.new_block_ids) + int32s(reply.copy_destination_block_ids)
        return self.check(tenant, sorted(set(found)), before)

    async def end(self) -> None:
        sequence_id = self.rng.choice(list(self.live))
        _, num_tokens = self.live.pop(sequence_id)
        await self.step(commit_sequence_ids=le64(sequence_id), commit_num_tokens=le32(num_tokens),
                        commit_num_new_tokens=le32(0), release_sequence_ids=le64(sequence_id))  # fmt: skip

    async def step(self, **columns: bytes) -> pb.StepResponse:
        self.step_id += 1
        reply = await self.session.step(self.step_id, **columns)
        if self.is_engine:
            copies = zip(int32s(reply.copy_source_block_ids), int32s(reply.copy_destination_block_ids), strict=True)
            for source, destination in copies:
                self.blocks[destination] = self.blocks[source]
        return reply

    def check(self, tenant: str, granted: list[int], before: np.ndarray) -> int:
        """Looks at the blocks, then fills them."""
        number, num_foreign = TENANTS[tenant], 0
        for block in granted:
            found = set(np.unique(self.blocks[block]).tolist())
            assert found <= {0, number}, f"tenant {tenant} was given a block that holds {sorted(found)}"
            num_foreign += not set(np.unique(before[block]).tolist()) <= {0, number}
        self.blocks[granted] = number
        return num_foreign


async def run(seed: int) -> Counts:
    """Counts blocks that changed their tenant while full of its number, which is the fault."""
    rng = random.Random(seed)
    num_foreign = 0
    async with serving(num_blocks=_NUM_BLOCKS) as api:
        readers = [await _reader(api, is_engine, rng) for is_engine in (True, False)]
        for _ in range(_ROUNDS):
            reader = rng.choice(readers)
            if reader.live and rng.random() < 0.5:
                await reader.end()
            if reader.live and rng.random() < 0.3:
                num_foreign += await reader.fork()
            num_foreign += await reader.start()
        await api.audit()
    return Counts(num_foreign, num_foreign)


async def _reader(api: Api, is_engine: bool, rng: random.Random) -> _Reader:
    session = await api.open(engine=is_engine)
    (pool,) = api.server.session_manager.registry.pools
    return _Reader(session, is_engine, blocks_of(pool), rng)
