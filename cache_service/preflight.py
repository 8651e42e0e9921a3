"""Checks a cache service's config against the machine before anything is loaded or reserved: kernel, addresses and memory."""

from collections.abc import Callable

from kvkeeper.common.service import kernel
from kvkeeper.common.service.memory_limit import OutOfMemory, available_bytes, require
from kvkeeper.common.service.preflight import check_addresses
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.sizes import Share, size

from .config import LEAST_POOL_MEMORY, CacheConfig
from .memory.kept.memory_directory import kept_bytes


def check_kernel(config: CacheConfig) -> None:
    """The ends of attached processes, and memory without a name where pools or host tiers take such. Raises StartError."""
    has_unnamed = config.memory_dir is None and (config.device == "cpu" or config.host_memory or config.num_host_blocks)
    kernel.require([kernel.ENDS_OF_PROCESSES, *([kernel.SHARED_MEMORY] if has_unnamed else [])])


def check_start(config: CacheConfig) -> None:
    """Raises StartError."""
    if not config.take_over:  # the service that runs has them until it is asked to stop
        check_addresses(config.listen, config.metrics_listen, config.health_address)
    try:
        require(host_bytes(config))
    except OutOfMemory as error:
        raise StartError(f"{pools_text(config)}, lower one: {error}") from None


def host_bytes(config: CacheConfig) -> int:
    """Host memory that is reserved at start. Pools by number of blocks are made when their first session opens.

    Pools that an earlier run has left have theirs already, and their host tiers.
    """
    if config.num_blocks is not None:
        return 0
    pool = pool_bytes(config, available_bytes) if config.device == "cpu" else 0
    num_kept = kept_bytes(config.memory_dir) if config.memory_dir is not None else 0
    return max(config.num_pools * (pool + host_tier_bytes(config)) - num_kept, 0)


def pool_bytes(config: CacheConfig, available: Callable[[], int]) -> int:
    """Bytes of each pool, where they are not given in blocks; a share is of those that are available, divided by the pools."""
    amount = config.pool_memory
    return max(amount.of(available()) // config.num_pools, LEAST_POOL_MEMORY) if isinstance(amount, Share) else amount


def host_tier_bytes(config: CacheConfig) -> int:
    """Host tier of each pool, where the config gives it in bytes: the size of a block is not known yet."""
    return 0 if config.num_host_blocks else config.host_memory


def pools_text(config: CacheConfig) -> str:
    """The flags that say how much is reserved at start."""
    text = f"--num-pools {config.num_pools} of --pool-memory {size(config.pool_memory)} each"
    if num_bytes := host_tier_bytes(config):
        text += f" and --host-memory {size(num_bytes)}"
    return text
