"""The sizes and rules of one pool, built once and never changed."""

from dataclasses import dataclass

from .kv_spec import WHOLE, ReadSpan
from .sequence_args import Retention


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Sizes and rules of one pool. num_blocks and num_host_blocks count the null block of their tier."""

    num_blocks: int
    block_size: int
    max_sequences: int = 256
    max_tokens_per_sequence: int = 4096
    watermark: float = 0.01  # share of the blocks kept free when admitting while something runs
    eviction_policy: str = "adaptive"
    prefix_caching: bool = True
    num_host_blocks: int = 0  # 0: no host tier
    evict_above: float = 1.0  # share of the pool; above it, cached blocks are evicted before they are needed
    pressure_levels: tuple[float, ...] = (0.6, 0.8, 0.95)  # where medium, high and critical begin
    prefix_ttl: float | None = None  # seconds that a cached block lives without being used
    min_prefix_tokens: int = 0  # a shorter match is no hit
    max_cached_blocks: int | None = None  # most blocks that are cached and not held
    tenant_quota: float = 1.0  # share of the pool that one tenant may keep cached, 0 to 0.5; 1 is no quota
    tenant_quotas: tuple[tuple[str, float], ...] = ()  # of tenants with a share of their own
    soon_share: float = 0.25  # of the pool: most blocks that are kept because they are expected back soon
    logits_memory: int = 0  # bytes of stored logits; 0 stores none
    group_spans: tuple[ReadSpan, ...] = (WHOLE,)  # what each group of layers reads; the first reads all
    max_partial_nodes: int = 4096  # what sequences left behind their last whole block; 0 keeps none of it
    has_tail: bool = False  # whether the groups behind the first are finer copies of the newest tokens, which hits do without

    @property
    def has_states(self) -> bool:
        """Whether a group of layers has states instead of K and V of each token."""
        return any(span.checkpoint_blocks for span in self.group_spans)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def limit_tokens(self) -> int:
        """Most tokens that one sequence can ever have here."""
        return min(self.max_tokens_per_sequence, self._most_entries() * self.block_size)

    def held_blocks(self, num_entries: int) -> int:
        """Most blocks of all groups that a sequence of so many table entries holds, while it grows by one token at a time."""
        return sum(span.most_blocks(num_entries, self.block_size) for span in self.group_spans)

    def _most_entries(self) -> int:
        """Entries of the longest table that fits the pool."""
        usable = self.num_usable_blocks
        if len(self.group_spans) == 1:
            return usable
        low, high = 0, usable
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.held_blocks(middle) <= usable else (low, middle - 1)
        return low

    def limit_with(self, retention: Retention | None) -> int:
        """Most tokens of a sequence with this retention: the blocks that it holds at once have to fit, not all it ever held."""
        fits = retention is not None and retention.num_held_blocks(self.block_size) <= self.num_usable_blocks
        return self.max_tokens_per_sequence if fits else self.limit_tokens
