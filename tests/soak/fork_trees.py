"""Row 4: forks are isolated. Trees 64 forks deep, random writes into every branch, and a byte compare of all branches.

The memory is real bytes: copies are run as the service runs them, writes go where the table says, and each branch must still
read what was written to it and to its ancestors before the fork. Tokens are never drawn twice, because equal tokens would
rightly share a block that holds other random bytes.
"""

import random
from dataclasses import dataclass

import numpy as np

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from tests.soak.row import Counts
from tests.support.worlds.core_pool import int32
from tests.support.worlds.drivers import CoreDriver

DEPTH = 64
_MOST_BRANCHES = 24
_SLOT_BYTES = 8


@dataclass
class _Branch:
    sequence_id: int
    depth: int
    tokens: list[int]
    slots: list[bytes]  # what each position holds


class ForkTree:
    """A session of one-item calls with branches that fork, write, shrink and end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = self.rng.choice([1, 2, 3, 4])
        self._most_tokens = DEPTH + 16
        config = PoolConfig(
            num_blocks=_MOST_BRANCHES * (self._most_tokens // self.block_size + 2) + 1,
            block_size=self.block_size,
            max_tokens_per_sequence=self._most_tokens,
            prefix_caching=self.rng.random() < 0.7,
        )
        self.driver = CoreDriver(config)
        self.session: SessionId = self.driver.open_session(Executor.CACHE)
        self._block_bytes = self.block_size * _SLOT_BYTES
        self._arena = SharedMemoryArena(config.num_blocks * self._block_bytes)
        self.memory = self._arena.blocks(config.num_blocks, self._block_bytes)
        self.branches: list[_Branch] = []
        self.num_forks = 0
        self._next_id = 1
        tokens = [self.rng.randrange(2**31) for _ in range(self.rng.randint(1, 2 * self.block_size + 1))]
        self.driver.create_sequence(self.session, SequenceArgs(SequenceId(1), int32(tokens)))
        self.branches.append(_Branch(1, 0, tokens, []))
        self.write(self.branches[0], len(tokens))

    def write(self, branch: _Branch, length: int) -> None:
        """New bytes behind what the branch has, up to so many tokens."""
        q = branch.sequence_id
        copies = self.driver.extend(self.session, q, length, look_up=True)
        assert copies is not None
        self._arena.copy(copies, self._block_bytes, None)
        first = len(branch.slots)
        known = len(branch.tokens)
        branch.tokens += [self.rng.randrange(2**31) for _ in range(length - known)]
        branch.slots += [self.rng.randbytes(_SLOT_BYTES) for _ in range(first, length)]
        table = self.table(branch)
        for position in range(first, length):
            block, at = table[position // self.block_size], position % self.block_size * _SLOT_BYTES
            self.memory[block, at : at + _SLOT_BYTES] = np.frombuffer(branch.slots[position], np.uint8)
        self.driver.commit(self.session, q, length, known, int32(branch.tokens[known:]))

    def fork(self, parent: _Branch) -> _Branch:
        self._next_id += 1
        length = len(parent.slots) if self.rng.random() < 0.6 else self.rng.randint(1, len(parent.slots))
        self.driver.fork(self.session, parent.sequence_id, self._next_id, length)
        child = _Branch(self._next_id, parent.depth + 1, parent.tokens[:length], parent.slots[:length])
        self.branches.append(child)
        self.num_forks += 1
        return child

    def truncate(self, branch: _Branch) -> None:
        length = self.rng.randint(1, len(branch.slots))
        self.driver.truncate(self.session, branch.sequence_id, length)
        del branch.tokens[length:], branch.slots[length:]

    def release(self, branch: _Branch) -> None:
        self.branches.remove(branch)
        self.driver.release(self.session, branch.sequence_id)

    def compare(self) -> None:
        for branch in self.branches:
            found = self.memory[self.table(branch)].tobytes()[: len(branch.slots) * _SLOT_BYTES]
            assert found == b"".join(branch.slots), f"branch {branch.sequence_id} of depth {branch.depth} changed"

    def table(self, branch: _Branch) -> list[int]:
        return [int(block) for block in self.driver.view(self.session, SequenceId(branch.sequence_id)).block_table]


def run(seed: int) -> Counts:
    """Counts forks; the fault is a copy-on-write."""
    tree = ForkTree(seed)
    rng = tree.rng
    deepest = tree.branches[0]
    while deepest.depth < DEPTH:
        while len(tree.branches) >= _MOST_BRANCHES:
            tree.release(rng.choice([branch for branch in tree.branches if branch is not deepest]))
        child = tree.fork(deepest if rng.random() < 0.7 else rng.choice(tree.branches))
        deepest = max(deepest, child, key=lambda branch: branch.depth)
        for branch in rng.sample(tree.branches, min(3, len(tree.branches))):
            if rng.random() < 0.15:
                tree.truncate(branch)
            elif len(branch.slots) < DEPTH + 16:
                tree.write(branch, len(branch.slots) + rng.randint(1, min(3, DEPTH + 16 - len(branch.slots))))
        tree.compare()
    assert tree.driver.check_invariants() == []
    return Counts(tree.num_forks, tree.driver.stats().num_copies_on_write)
