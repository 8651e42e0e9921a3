"""The services' addresses where none is given: the environment over defaults. Imports little, because every command does."""

import os

CACHE = "127.0.0.1:7410"
ENGINE = "127.0.0.1:7411"


def cache_address() -> str:
    """The cache service's address, host:port or unix:/path."""
    return os.environ.get("KVKEEPER_CACHE_LISTEN") or CACHE


def engine_address() -> str:
    """The engine service's address, host:port or unix:/path."""
    return os.environ.get("KVKEEPER_ENGINE_LISTEN") or ENGINE
