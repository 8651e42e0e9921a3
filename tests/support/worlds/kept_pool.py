"""A kept index in memory of the test, as a killed service would leave it, and what a pool made of it must be.

`KeptMemory` stands for the files of one pool. `restored` is what the next run makes of it at this moment; the memory itself
stays as it is, so that the pool can go on.
"""

import copy
from dataclasses import replace

import numpy as np

from kvkeeper.cache_service.core.calls.restore import RestoreResult
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kept_index import KeptIndex, row_words
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Int32Array

Chain = tuple[str, tuple[int, ...]]  # tenant, and the tokens from the root down to the end of a block


class KeptMemory:
    """The files of one pool, as arrays."""

    def __init__(self, config: PoolConfig, key: int = 11) -> None:
        self.config = config
        self.tenants: list[str] = []
        words = row_words(config.block_size)
        self._arrays = np.zeros(config.num_blocks, np.uint64), np.zeros((config.num_blocks, words), np.int32)
        self._key = key

    @property
    def checks(self) -> np.ndarray:
        return self._arrays[0]

    @property
    def rows(self) -> Int32Array:
        return self._arrays[1]

    @property
    def kept(self) -> KeptIndex:
        return KeptIndex(self._key, *self._arrays, tuple(self.tenants), self.tenants.append)

    def restored(self, *, may_still_write: bool = False) -> tuple[PoolManager, RestoreResult]:
        """The pool that the next run has, if this one is killed now."""
        manager = PoolManager(self.config)
        kept = replace(self.kept, checks=self.checks.copy(), rows=self.rows.copy(), add_tenant=lambda name: None)
        return manager, manager.restore(kept, may_still_write=may_still_write)


def write_all(manager: PoolManager) -> None:
    while manager.write_record(2):
        pass


def chains(manager: PoolManager, *, on_device: bool = False) -> dict[Chain, int]:
    """The block of each cached prefix; on_device: of those alone that lie on the device with all before them."""
    index, found = manager.state.index, dict[Chain, int]()
    stack = [(index.find_root(tenant), (tenant, ())) for tenant in list(index._roots)]
    while stack:
        above, (tenant, tokens) = stack.pop()
        node = index.first_child(above)
        while node:
            block = int(index.block_of_node[node])
            chain = tenant, (*tokens, *index.key_tokens(node)[1].tolist())
            if block or not on_device:
                found[chain] = block
                stack.append((node, chain))
            node = index.next_sibling(node)
    return found


def twin_of(memory: KeptMemory) -> KeptMemory:
    """A copy, to be damaged."""
    return copy.deepcopy(memory)
