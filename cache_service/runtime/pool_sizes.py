"""PoolSizes: what a pool of a KV spec is to have, by the configuration: its limits, and the bytes of its arenas."""

from collections.abc import Callable
from dataclasses import fields

from kvkeeper.common.service.memory_limit import available_bytes
from kvkeeper.common.service.sizes import size

from ..config import CacheConfig, most_blocks
from ..core.values.errors import OutOfPools
from ..core.values.kv_spec import WHOLE, KvSpec
from ..core.values.pool_config import PoolConfig
from ..preflight import host_tier_bytes, pool_bytes

_SIZES = {"num_blocks", "num_host_blocks", "max_tokens_per_sequence"}  # settings, too, and a pool may have fewer of its memory
_RULES = {field.name for field in fields(PoolConfig)} & {field.name for field in fields(CacheConfig)} - _SIZES


class PoolSizes:
    """The sizes of the pool of any spec, by one configuration."""

    def __init__(self, config: CacheConfig, available: Callable[[], int] = available_bytes) -> None:
        """available: the bytes that pools can have now, for a share of them."""
        self._config = config
        self.pool_memory = pool_bytes(config, available)  # of each pool that is given in bytes

    @property
    def is_known_ahead(self) -> bool:
        """Whether pools are given in bytes, so that their memory can be reserved before there is a spec."""
        return self._config.num_blocks is None

    @property
    def host_memory(self) -> int:
        """Bytes of a host tier that is given in bytes, else 0."""
        return host_tier_bytes(self._config)

    def stored(self, spec: KvSpec) -> KvSpec:
        """The spec, with what this service keeps its blocks in below the device."""
        wanted = self._config.host_kv_dtype
        return spec if wanted == "auto" else spec.stored_as(wanted)

    def of(self, spec: KvSpec) -> tuple[PoolConfig, int]:
        """The configuration of a pool of this spec, and the bytes of its arena. Raises OutOfPools."""
        num_blocks, num_bytes = self._blocks(spec.block_bytes)
        config = PoolConfig(
            num_blocks=num_blocks,
            block_size=spec.block_size,
            max_tokens_per_sequence=self._config.tokens_of_sequence((num_blocks - 1) * spec.block_size),
            num_host_blocks=self._host_blocks(spec.stored_bytes),
            group_spans=tuple(group.span for group in spec.groups) or (WHOLE,),
            has_tail=any(group.is_tail for group in spec.groups),
            **{name: getattr(self._config, name) for name in _RULES},
        )
        return config, num_bytes

    def host_bytes(self, config: PoolConfig, spec: KvSpec) -> int:
        """Bytes of a host tier's arena; 0 where there is none."""
        return max(config.num_host_blocks * spec.stored_bytes, self.host_memory) if config.num_host_blocks else 0

    def _blocks(self, block_bytes: int) -> tuple[int, int]:
        """Blocks of this size in a pool, and the bytes of its arena."""
        if self._config.num_blocks is not None:
            return self._config.num_blocks, self._config.num_blocks * block_bytes
        num_bytes = self.pool_memory
        _check_room(num_bytes, block_bytes, "--pool-memory")
        return most_blocks(num_bytes, block_bytes), num_bytes

    def _host_blocks(self, block_bytes: int) -> int:
        if not self.host_memory:
            return self._config.num_host_blocks
        _check_room(self.host_memory, block_bytes, "--host-memory")
        return most_blocks(self.host_memory, block_bytes)


def _check_room(num_bytes: int, block_bytes: int, flag: str) -> None:
    """Raises OutOfPools where the null block and one more do not fit."""
    if num_bytes < 2 * block_bytes:
        raise OutOfPools(f"{flag} holds fewer than 2 blocks of {size(block_bytes)}", flag=flag)
