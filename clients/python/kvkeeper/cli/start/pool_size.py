"""How large pools are that `kvkeeper up` starts: a share as an amount, and by default on a CUDA device all that a model leaves.

Found once, before a service starts: one that is started again would find its engine's weights, and the pool of the service
before. A process of its own looks at a device, because a context takes half a GiB there for as long as its process lives.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvkeeper.cli.start.services import PARENT_VARIABLE, end_with_parent
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.sizes import Share, size

if TYPE_CHECKING:
    from kvkeeper.cache_service.config import CacheConfig
    from kvkeeper.engine_service.config import EngineConfig

_OF_DEVICE = Share(90)
_GRAPHS, _STEPS = 1 << 30, 2 << 30  # bytes; the latter is what steps compute with, and two contexts
_LOOK_S = 60.0


class FreeUnknown(Exception):
    """There is no amount to find. The text is one line that says why."""


def find_pool_flags(argv: Sequence[str], cache: "CacheConfig", engine: "EngineConfig", say: Callable[[str], None]) -> list[str]:
    """Further flags of a cache service with these flags, which make this config. say gets the amount. Raises StartError."""
    from kvkeeper.cache_service.config import SOURCE
    from kvkeeper.cache_service.preflight import pool_bytes

    given = {origin.setting.name for origin in SOURCE.origins(argv, os.environ) if origin.place}
    is_share, amount = isinstance(cache.pool_memory, Share), size(cache.pool_memory)
    if cache.num_blocks is not None or not (is_share or (cache.device != "cpu" and "pool_memory" not in given)):
        return []
    num_pools = cache.num_pools if is_share or "num_pools" in given else 1
    try:
        if cache.memory_dir is not None:
            raise FreeUnknown("pools in --memory-dir keep one size from start to start")
        free = find_free_bytes(cache.device)
        of_free = f"of the {size(free)} that are free on {'the host' if cache.device == 'cpu' else cache.device}"
        if is_share:
            num_bytes, text = pool_bytes(cache, lambda: free), f"{amount} {of_free}"
        else:
            left, less = _beside_model(free, engine)
            num_bytes, text = left // num_pools, f"{size(_OF_DEVICE)} {of_free}, {less}"
            if num_bytes < pool_bytes(cache, lambda: free):
                raise FreeUnknown(f"{text}, would be less")
    except FreeUnknown as error:
        if is_share:
            raise StartError(f"--pool-memory {amount}: {error}") from None
        say(f"--pool-memory is {amount} for each pool: {error}")
        return []
    pools = f"{num_pools} pools have {size(num_bytes)} each" if num_pools > 1 else f"one pool has {size(num_bytes)}"
    say(f"{pools}: {text}; --pool-memory gives another size")
    return ["--pool-memory", str(num_bytes), "--num-pools", str(num_pools)]


def find_free_bytes(device: str) -> int:
    """Bytes that pools can have on a device now, or on the host ("cpu"). Raises FreeUnknown."""
    command, environ = [sys.executable, "-P", "-m", __name__, device], {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    try:
        return int(subprocess.run(command, capture_output=True, check=True, env=environ, text=True, timeout=_LOOK_S).stdout)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).splitlines()[-1]
    raise FreeUnknown(f"the free memory of {device} was not found: {said}")


def _beside_model(free: int, engine: "EngineConfig") -> tuple[int, str]:
    """What a model leaves of a device with so much free memory, and what it takes, in words."""
    from kvkeeper.engine_service.preflight import model_memory

    weights = model_memory(engine).weights // engine.tensor_parallel if engine.device != "cpu" else 0
    others = _STEPS + (_GRAPHS if engine.graphs else 0)
    return _OF_DEVICE.of(free) - weights - others, f"less {size(weights)} for weights and {size(others)} for graphs and steps"


def _main(device: str) -> None:
    from kvkeeper.cache_service.memory.select_memory import make_memory
    from kvkeeper.common.cuda.errors import CudaError

    end_with_parent()
    try:
        print(make_memory(device).available_bytes())
    except CudaError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main(*sys.argv[1:])
