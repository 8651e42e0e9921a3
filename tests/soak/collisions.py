"""Row 6: a hash collision cannot hit.

The index finds a block by a dictionary keyed by parent and tokens. Here the hash of those keys is cut to 8 bits, so that nearly
every look-up meets other keys under its own hash, and the comparison of the tokens is all that tells them apart.
"""

import random
from typing import Any

import numpy as np

from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Executor
from tests.soak.prefix_hits import make_traces, run_engines
from tests.soak.row import Counts
from tests.soak.toy_engine import Memory, ToyEngine
from tests.support.worlds.drivers import CoreDriver

_NUM_KEYS = 1500


class CutDict(dict[Any, Any]):
    """A dictionary with keys that hash to 8 bits. num_collisions: keys of equal hash that the comparison told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.num_collisions = 0
        meet = self._meet

        class Key(bytes):
            def __hash__(self) -> int:
                return hash(bytes(self)) & 0xFF

            def __eq__(self, other: object) -> bool:
                return meet(bytes(self) == bytes(other))  # type: ignore[call-overload]

        self._key = Key

    def get(self, key: bytes, default: Any = None) -> Any:
        return super().get(self._key(key), default)

    def __getitem__(self, key: bytes) -> Any:
        return super().__getitem__(self._key(key))

    def __setitem__(self, key: bytes, value: Any) -> None:
        super().__setitem__(self._key(key), value)

    def __delitem__(self, key: bytes) -> None:
        super().__delitem__(self._key(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))  # type: ignore[arg-type]

    def setdefault(self, key: bytes, default: Any = None) -> Any:
        return super().setdefault(self._key(key), default)

    def pop(self, key: bytes, *default: Any) -> Any:
        return super().pop(self._key(key), *default)

    def _meet(self, is_same: bool) -> bool:
        self.num_collisions += not is_same
        return is_same


def cut_hashes(index: PrefixIndex) -> CutDict:
    """From now on the keys of an empty index collide."""
    cut = CutDict()
    assert not index._nodes
    index._nodes = cut
    return cut


def run(seed: int) -> Counts:
    """Counts collisions, which are the fault: in a bare index, then under engines that read what they hit."""
    rng = random.Random(seed)
    num_collisions = _bare_index(rng)
    config = PoolConfig(num_blocks=60, block_size=rng.choice([1, 2, 4]), max_tokens_per_sequence=40, watermark=0.0)
    driver = CoreDriver(config)
    cut = cut_hashes(driver.manager.state.index)
    memory: Memory = np.full(config.num_blocks * config.block_size, -1, np.int64)
    engines = [ToyEngine(driver, memory, executor, rng) for executor in Executor]
    for engine in engines:
        for trace in make_traces(rng, config.block_size, 20, 4):
            engine.submit(trace)
    run_engines(engines, rng)
    assert driver.check_invariants() == []
    return Counts(num_collisions + cut.num_collisions, num_collisions + cut.num_collisions)


def _bare_index(rng: random.Random) -> int:
    """Known keys are found, and their block; unknown ones of the same hashes are not."""
    index = PrefixIndex(_NUM_KEYS + 1, 2)
    cut = cut_hashes(index)
    root = index.root("")
    tokens = np.array(rng.sample(range(10**6), 4 * _NUM_KEYS), np.int32).reshape(-1, 2)
    known, unknown = tokens[:_NUM_KEYS], tokens[_NUM_KEYS:]
    blocks = np.arange(1, _NUM_KEYS + 1, dtype=np.int32)
    index.insert_each(np.full(_NUM_KEYS, root, np.int32), known, blocks)
    for block, row in zip(blocks.tolist(), known, strict=True):
        assert index.block_of_node[index.match(root, row, 1)].tolist() == [block]
    for row in unknown:
        assert not len(index.match(root, row, 1)), "a collision was taken for a hit"
    return cut.num_collisions
