"""Scopes: for whom a prefix tree is, and with which adapter and salt. Prompts of two scopes share nothing.

A scope is one text. That of the base model without a salt is the tenant's name; otherwise so many characters are behind the
name that no name is as long, so that no two scopes are the same text. A salt is in it as its digest alone, so that nothing that
is kept, named or shown has the salt itself.
"""

from hashlib import sha256

MOST_TENANT_CHARS = 64
_WIDTH = 64  # characters of an adapter, and of a salt's digest
_SUFFIX_CHARS = 2 * (1 + _WIDTH)


def make_scope(tenant: str, adapter: str = "", salt: str = "") -> str:
    """adapter: a digest of 64 hex digits, or empty for the base model. salt: of any length."""
    if not adapter and not salt:
        return tenant
    digest = sha256(salt.encode()).hexdigest() if salt else ""
    return f"{tenant}\0{adapter:->{_WIDTH}}\0{digest:->{_WIDTH}}"


def get_tenant(scope: str) -> str:
    """The tenant's name."""
    return scope if len(scope) <= MOST_TENANT_CHARS else scope[:-_SUFFIX_CHARS]
