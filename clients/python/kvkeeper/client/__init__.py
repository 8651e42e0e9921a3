"""Python client of kvkeeper: the cache service and the engine service, for asyncio and for threads.

Imports neither service, nor torch. The messages are those of kvkeeper.cache.v1 and kvkeeper.engine.v1.
"""

from kvkeeper.client.arena import Arena
from kvkeeper.client.cache import AsyncCacheClient, AsyncCacheSession
from kvkeeper.client.cache_sync import CacheClient, CacheSession
from kvkeeper.client.engine import AsyncEngineClient, AsyncGeneration, EngineClient, Generation
from kvkeeper.client.engine_calls import BeamSearch, GenerateOptions, Piece, Result, Retention, Sampling, TokenLogprobs, Usage
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.kv_chunks import KvTokens
from kvkeeper.client.retry import CallOptions
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
    "EngineClient",
    "GenerateOptions",
    "Generation",
    "KvTokens",
    "KvkeeperError",
    "Piece",
    "Result",
    "Retention",
    "Sampling",
    "StepItems",
    "StepResult",
    "TokenLogprobs",
    "Usage",
    "decode",
    "encode",
]
