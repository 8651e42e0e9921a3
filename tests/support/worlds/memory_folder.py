"""A folder for kept memory on tmpfs, as a test wants it, and a pool in it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.memory.memory_directory import MemoryDirectory

SPEC = KvSpec(b"spec", "model", 1, 1, 4, 4, 4)  # blocks of 128 bytes, of 4 tokens


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A path on tmpfs at which nothing is; all of it is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="kvk-", dir="/dev/shm") as name:
        yield Path(name) / "memory"


def fill(path: Path, *, num_blocks: int = 16, num_cached: int = 8, tenants: tuple[str, ...] = ("",), seed: int = 0) -> None:
    """What a killed service leaves there: one chain for each tenant, and blocks that hold their own number."""
    directory = MemoryDirectory(path, keep=True)
    kept = directory.make_pool(directory.allocate(num_blocks * SPEC.block_bytes), SPEC, num_blocks)
    manager = PoolManager(PoolConfig(num_blocks, SPEC.block_size))
    manager.restore(kept.index.kept, may_still_write=False)
    rng = np.random.default_rng(seed)
    for number, blocks in enumerate(np.array_split(np.arange(1, num_cached + 1, dtype=np.int32), len(tenants))):
        tokens = rng.integers(0, 100, len(blocks) * SPEC.block_size).astype(np.int32)
        manager.state.index.insert_run(manager.state.index.root(tenants[number]), tokens, blocks)
    while manager.write_record(1024):
        pass
    kept.arena.blocks(num_blocks, SPEC.block_bytes)[:] = np.arange(num_blocks, dtype=np.uint8)[:, None]
    kept.close()
    kept.arena.close()
    directory.close()


def taken_over(path: Path) -> PrefixIndex | None:
    """The index that the next service has of the one pool in the folder; None where it refuses the files."""
    directory = MemoryDirectory(path, keep=True)
    try:
        pools = directory.open_pools()
        if not pools:
            return None
        (kept,) = pools
        manager = PoolManager(PoolConfig(kept.num_blocks, kept.spec.block_size))
        manager.restore(kept.index.kept, may_still_write=kept.may_be_written())
        assert not (wrong := manager.check_invariants()), wrong
        kept.close()
        kept.arena.close()
        return manager.state.index
    finally:
        directory.close()
