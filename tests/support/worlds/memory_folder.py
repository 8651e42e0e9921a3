"""A folder for kept memory on tmpfs, as a test wants it, and a pool in it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kept_index import Verification
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.memory.kept.kept_pool import BlockDigests
from kvkeeper.cache_service.memory.kept.memory_directory import MemoryDirectory
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena

SPEC = KvSpec(b"spec", "model", 1, 1, 4, 4, 4)  # blocks of 128 bytes, of 4 tokens


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A path on tmpfs at which nothing is; all of it is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="kvk-", dir="/dev/shm") as name:
        yield Path(name) / "memory"


def fill(
    path: Path,
    *,
    num_blocks: int = 16,
    num_cached: int = 8,
    tenants: tuple[str, ...] = ("",),
    num_host_blocks: int = 0,
    with_digests: bool = False,
    seed: int = 0,
) -> None:
    """What a killed service leaves there: one chain for each tenant, and blocks that hold their own number.

    With a host tier every second block of a chain lies there too, and every fourth there alone; a host block has the number of
    its device block, and holds it plus 100.
    """
    directory = MemoryDirectory(path, keep=True)
    kept = directory.make_pool(directory.allocate(num_blocks * SPEC.block_bytes), SPEC, num_blocks)
    if num_host_blocks:
        directory.add_hosts(kept, directory.allocate_host(num_host_blocks * SPEC.block_bytes), SPEC, num_host_blocks)
    for tier, first in zip(kept.tiers, (0, 100), strict=False):
        assert isinstance(tier.arena, SharedMemoryArena)
        content = tier.arena.blocks(tier.num_blocks, SPEC.block_bytes)
        content[:] = (np.arange(tier.num_blocks) + first).astype(np.uint8)[:, None]
    manager = PoolManager(PoolConfig(num_blocks, SPEC.block_size, num_host_blocks=num_host_blocks))
    manager.restore(kept.kept(), may_still_write=False)
    rng, index = np.random.default_rng(seed), manager.state.index
    chains = np.array_split(np.arange(1, num_cached + 1, dtype=np.int32), len(tenants)) if tenants else []
    for number, blocks in enumerate(chains):
        tokens = rng.integers(0, 100, len(blocks) * SPEC.block_size).astype(np.int32)
        nodes = index.insert_run(index.root(tenants[number]), tokens, blocks)
        if num_host_blocks:
            index.add_hosts(nodes[1::2], blocks[1::2])
            index.note_filled(blocks[1::2])
            index.leave_device(blocks[3::4])
    while manager.record.write(1024, BlockDigests(kept).of if with_digests else None):
        pass
    kept.close()
    for tier in kept.tiers:
        tier.arena.close()
    directory.close()


def taken_over(path: Path, *, num_verified_blocks: int | None = None) -> PrefixIndex | None:
    """The index that the next service has of the one pool in the folder; None where it refuses the files.

    num_verified_blocks: compared with their digests, 0 for all; by default none is.
    """
    directory = MemoryDirectory(path, keep=True)
    try:
        pools = directory.open_pools()
        if not pools:
            return None
        (kept,) = pools
        num_host_blocks = kept.hosts.num_blocks if kept.hosts is not None else 0
        manager = PoolManager(PoolConfig(kept.device.num_blocks, kept.spec.block_size, num_host_blocks=num_host_blocks))
        how = None if num_verified_blocks is None else Verification(BlockDigests(kept).of, num_verified_blocks, 0)
        manager.restore(kept.kept(), may_still_write=kept.may_be_written(), verification=how)
        assert not (wrong := manager.queries.check_invariants()), wrong
        kept.close()
        for tier in kept.tiers:
            tier.arena.close()
        return manager.state.index
    finally:
        directory.close()
