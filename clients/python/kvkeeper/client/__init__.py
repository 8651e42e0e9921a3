"""Python client of kvkeeper: the cache service and the engine service, for asyncio and for threads.

Owns the public names, the transport with its deadlines and repeats, the errors, and the cache service's clients; the engine
service's clients are in engine/. Each client is written once, for asyncio; that for threads is the same on a backend that
blocks. May import kvkeeper.common.tracing, kvkeeper.common.cuda and the messages of kvkeeper.cache.v1 and
kvkeeper.engine.v1; no service, and no torch. Each public name is imported at its first use, so that a program pays for what it
uses: numpy comes only with sessions of the cache service.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeeper.client.arena import Arena
    from kvkeeper.client.cache import AsyncCacheClient
    from kvkeeper.client.cache_sync import CacheClient
    from kvkeeper.client.credentials import Credentials
    from kvkeeper.client.engine.calls import (
        BeamSearch,
        GenerateOptions,
        OutputChunk,
        Result,
        Retention,
        Sampling,
        Thought,
        TokenLogprobs,
        Usage,
    )
    from kvkeeper.client.engine.client import AsyncEngineClient, AsyncGeneration
    from kvkeeper.client.engine.client_sync import EngineClient, Generation
    from kvkeeper.client.engine.prompts import Chat
    from kvkeeper.client.errors import KvkeeperError
    from kvkeeper.client.kv_chunks import KvTokens
    from kvkeeper.client.new_sequence import NewSequence
    from kvkeeper.client.retry import CallOptions
    from kvkeeper.client.session import AsyncCacheSession
    from kvkeeper.client.session_sync import CacheSession
    from kvkeeper.client.steps import StepItems, StepResult, decode, encode

__all__ = [
    "Arena",
    "AsyncCacheClient",
    "AsyncCacheSession",
    "AsyncEngineClient",
    "AsyncGeneration",
    "BeamSearch",
    "CacheClient",
    "CacheSession",
    "CallOptions",
    "Chat",
    "Credentials",
    "EngineClient",
    "GenerateOptions",
    "Generation",
    "KvTokens",
    "KvkeeperError",
    "NewSequence",
    "OutputChunk",
    "Result",
    "Retention",
    "Sampling",
    "StepItems",
    "StepResult",
    "Thought",
    "TokenLogprobs",
    "Usage",
    "decode",
    "encode",
]

_HOMES = {
    "arena": ("Arena",),
    "cache": ("AsyncCacheClient",),
    "cache_sync": ("CacheClient",),
    "credentials": ("Credentials",),
    "engine.client": ("AsyncEngineClient", "AsyncGeneration"),
    "engine.client_sync": ("EngineClient", "Generation"),
    "engine.prompts": ("Chat",),
    "engine.calls": (
        "BeamSearch",
        "GenerateOptions",
        "OutputChunk",
        "Result",
        "Retention",
        "Sampling",
        "Thought",
        "TokenLogprobs",
        "Usage",
    ),
    "errors": ("KvkeeperError",),
    "kv_chunks": ("KvTokens",),
    "new_sequence": ("NewSequence",),
    "retry": ("CallOptions",),
    "session": ("AsyncCacheSession",),
    "session_sync": ("CacheSession",),
    "steps": ("StepItems", "StepResult", "decode", "encode"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
