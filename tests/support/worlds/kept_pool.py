"""A kept index in memory of the test, as a killed service would leave it, and what a pool made of it must be.

`KeptMemory` stands for the files of one pool. `restored` is what the next run makes of it at this moment; the memory itself
stays as it is, so that the pool can go on.
"""

import copy
from dataclasses import replace

import numpy as np

from kvkeeper.cache_service.core.calls.restore import RestoreResult
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kept_index import KeptIndex, KeptTable, Verification, row_words
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Int32Array
from tests.support.worlds.event_reader import SPEC_KEY

Chain = tuple[str, tuple[int, ...]]  # scope, and the tokens from the root down to the end of a block


class KeptMemory:
    """The files of one pool, as arrays; those of a host tier where the pool has one."""

    def __init__(self, config: PoolConfig, key: int = 11) -> None:
        self.config = config
        self.scopes: list[str] = []
        self.device = _table(config.num_blocks, config.block_size, key)
        self.hosts = _table(config.num_host_blocks, config.block_size, key + 1) if config.num_host_blocks else None

    @property
    def checks(self) -> np.ndarray:
        return self.device.checks

    @property
    def rows(self) -> Int32Array:
        return self.device.rows

    @property
    def kept(self) -> KeptIndex:
        return KeptIndex(self.device, self.hosts, tuple(self.scopes), self._note_root)

    def _note_root(self, root: int, scope: str) -> bool:
        self.scopes[-root - 1 : -root] = [scope]
        return True

    def restored(
        self, *, may_still_write: bool = False, verification: Verification | None = None
    ) -> tuple[PoolManager, RestoreResult]:
        """The pool that the next run has, if this one is killed now."""
        manager, twin = PoolManager(self.config, spec_key=SPEC_KEY), twin_of(self)
        kept = replace(twin.kept, note_root=lambda root, scope: True)
        return manager, manager.restore(kept, may_still_write=may_still_write, verification=verification)


def _table(num_blocks: int, block_size: int, key: int) -> KeptTable:
    return KeptTable(key, np.zeros(num_blocks, np.uint64), np.zeros((num_blocks, row_words(block_size)), np.int32))


def write_all(manager: PoolManager) -> None:
    while manager.record.write(2):
        pass


def chains(manager: PoolManager, *, is_written: bool = False, group: int = 0) -> dict[Chain, tuple[int, int]]:
    """The device block and the host block of each cached prefix in one group of layers, 0 for none.

    is_written: of those alone that lie in a tier with all before them, without copies that are still on the way.
    """
    index, found = manager.state.index, dict[Chain, tuple[int, int]]()
    filling = manager.swapper.host.is_filling if is_written and manager.swapper is not None else np.zeros(1 << 10, np.bool_)
    stack = [(index.find_root(scope), (scope, ())) for scope in list(index.roots._of_scope)]
    while stack:
        above, (scope, tokens) = stack.pop()
        node = int(index.links.first_child[above])
        while node:
            chain = scope, (*tokens, *index.key_tokens(node)[1].tolist())
            whole = [_places(index, node, each, filling) for each, span in enumerate(index.held.spans) if span.is_whole]
            if all(map(any, whole)):
                places = _places(index, node, group, filling)
                if any(places):
                    found[chain] = places
                stack.append((node, chain))
            node = int(index.links.next_sibling[node])
    return found


def _places(index: PrefixIndex, node: int, group: int, filling: np.ndarray) -> tuple[int, int]:
    of_blocks, of_hosts = [index.block_of_node, *index.held.group_blocks], [index.host_of_node, *index.held.group_hosts]
    host = int(of_hosts[group][node])
    return int(of_blocks[group][node]), host if not filling[host] else 0


def twin_of(memory: KeptMemory) -> KeptMemory:
    """A copy, to be damaged."""
    return copy.deepcopy(memory)
