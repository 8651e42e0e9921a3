"""What the commands share that show something of each pool of the cache service: `tiers`, `misses`, `curve`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvkeeper.cli.console.outcome import OPTIONS
from kvkeeper.client import CacheClient


def read_pools(address: str) -> Sequence[Any]:
    """The PoolStats of each pool. Raises KvkeeperError."""
    with CacheClient(address, OPTIONS) as client:
        return client.stats().pools


def print_pools(pools: Sequence[Any], show: Callable[[Any], str], to_json: Callable[[Any], Any], *, is_json: bool) -> None:
    """Prints what `show` makes of each pool, or a JSON array of what `to_json` makes of them."""
    if is_json:
        print(json.dumps([to_json(pool) for pool in pools]))
    else:
        print("\n\n".join(map(show, pools)) or "no pool yet: an engine's session makes one")
