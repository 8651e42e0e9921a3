"""What `kvkeeper up` checks before it starts a process: configs, packages, addresses, the model's folder, memory, the kernel.

These are the services' own checks, in the order in which a user can correct the errors; flags are named as `up` names them.
Imports structlog and the parts of the services that need neither torch nor grpc, so commands import it only when they run.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvkeeper.cli.console.problems import UsageFailure
from kvkeeper.common.service.memory_limit import OutOfMemory, require
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.settings import ConfigError

if TYPE_CHECKING:
    from kvkeeper.cache_service.config import CacheConfig
    from kvkeeper.engine_service.config import EngineConfig

# Flags of `up` itself, named as the service names them.
_UP_FLAGS = ("--model", "--model-name", "--pool-memory", "--host-memory")


def check_start(flags: Mapping[str, Sequence[str]]) -> "tuple[CacheConfig, EngineConfig]":
    """The configs. flags: arguments of each service. Raises UsageFailure or StartError, with one line for people."""
    from kvkeeper.cache_service.preflight import check_kernel as check_kernel_for_cache
    from kvkeeper.engine_service.preflight import check_kernel as check_kernel_for_engine

    cache_config, engine_config = check_settings(flags)
    check_kernel_for_cache(cache_config)
    check_kernel_for_engine(engine_config)
    return cache_config, engine_config


def check_settings(flags: Mapping[str, Sequence[str]]) -> "tuple[CacheConfig, EngineConfig]":
    """All but the kernel. The configs. Raises as check_start does."""
    from kvkeeper.cache_service import preflight as cache
    from kvkeeper.cache_service.config import SOURCE as CACHE
    from kvkeeper.engine_service import preflight as engine
    from kvkeeper.engine_service.config import SOURCE as ENGINE

    with _named("cache"):
        cache_config = CACHE.load(flags["cache"], os.environ)
    with _named("engine"):
        engine_config = ENGINE.load(flags["engine"], os.environ)
    if cache_config.listen == engine_config.listen:
        raise UsageFailure(f"--engine-listen: an address of its own, --cache-listen is {cache_config.listen} too")
    with _named("cache"):
        cache.check_start(cache_config)
    with _named("engine"):
        engine.check_start(engine_config)
    with _named("cache"):
        try:
            require(cache.host_bytes(cache_config) + engine.needed_bytes(engine_config, engine.model_memory(engine_config)))
        except OutOfMemory as error:
            both = f"{cache.pools_text(cache_config)}, beside what the engine and its model take"
            raise StartError(f"{both}: {error}") from None
    return cache_config, engine_config


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors that name a service's flags, with the flags as `up` has them."""
    try:
        yield
    except ConfigError as error:
        raise UsageFailure(_as_typed(name, str(error))) from None
    except StartError as error:
        raise StartError(_as_typed(name, str(error))) from None


def _as_typed(name: str, text: str) -> str:
    """The text with a service's flags written as flags of `up`."""
    return re.sub(
        r"--[a-z][a-z-]*", lambda at: at[0] if at[0] in (*_UP_FLAGS, "--help") else f"--{name}-{at[0].removeprefix('--')}", text
    )
