"""KV events in vLLM's form, as its vllm/distributed/kv_events.py has them, and the hashes by which they name blocks.

In msgpack a batch is [seconds since the epoch, events, 0], and an event a map with its type. Fields have vLLM's names; those
that it leaves out at their defaults are left out here. A block's hash is that of vLLM's prefix caching with `sha256_cbor`, over
the hash of the block before it, its tokens and its extra keys. Before a first block stands the hash of a seed: what vLLM has
from PYTHONHASHSEED, else `vllm-none-hash`.
"""

import hashlib

import cbor2
import msgspec


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks each behind the one before it. parent_block_hash: of the first; None where it starts a prompt.

    extra_keys: for each block, the name of its adapter, and the salt if it is the first of a prompt with one. locality: of a
    medium that has several.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that are not in this medium any more."""

    block_hashes: list[int]
    medium: str
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is cached, as far as is known."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def sha256_cbor(value: object) -> bytes:
    """The 32 bytes that stand for a seed, or for (parent's hash, token ids, extra keys)."""
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def number(block_hash: bytes) -> int:
    """The part of a hash that events carry, as vLLM's do by default: the lowest 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")
