"""vLLM's KV cache on a cache service of kvkeeper: a connector of vLLM v1, named by --kv-transfer-config.

Owns what is loaded and stored and when, the transfers under way, and what a lost cache service costs; only connector.py knows
vLLM, and only device_pages.py torch. May import kvkeeper.client, kvkeeper.common.cuda and the messages of kvkeeper.cache.v1; no
service.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeeper.vllm.connector import KvkeeperConnector

__all__ = ["KvkeeperConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvkeeperConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvkeeper.vllm.connector import KvkeeperConnector  # needs vLLM, which the other files do without

    return KvkeeperConnector
