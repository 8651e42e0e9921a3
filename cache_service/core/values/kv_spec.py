"""The KV spec: the facts two sessions must have in common to share K and V, and the bytes of a block."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The parts of a KV spec that this service counts with, and all of it as `key`.

    key is equal exactly for specs that may share K and V, fields of newer clients included.
    """

    key: bytes
    model_id: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int  # of one element of K or V
    block_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K, or of V, of one token in one layer."""
        return self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.num_layers * 2 * self.block_size * self.token_bytes
