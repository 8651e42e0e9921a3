"""The names of blocks that clients see, by which independent programs can compare what they have cached.

A name is a chained SHA-256: over the parent's name and the tokens. The protocol's comment on WatchEventsResponse.block_names is
their definition.
"""

from hashlib import sha256

BLOCK_NAME_BYTES = 32


def first_parent(spec_key: bytes, tenant: str) -> bytes:
    """The name that a tenant's first blocks are behind. spec_key: KvSpec.key."""
    return sha256(spec_key + b"\0" + tenant.encode()).digest()


def block_name(parent: bytes, tokens: bytes) -> bytes:
    """Of a block with these tokens, LE32, behind a parent of that name. Takes about a microsecond."""
    return sha256(parent + tokens).digest()
