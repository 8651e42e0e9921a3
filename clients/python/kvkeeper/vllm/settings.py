"""The connector's settings: kv_connector_extra_config of vLLM's --kv-transfer-config, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvkeeper.client.targets import CACHE

RECOMPUTE = "recompute"


class WrongSettings(ValueError):
    """vLLM was started with settings that the connector cannot serve. The text says which one, and what to write."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may set."""

    address: str = CACHE  # of the cache service: host:port or unix:/path
    revision: str = ""  # of the weights; empty: found out, see page_spec.py
    store_generated: bool = True  # whether what a request generates is stored, too, once it has ended
    lookup_timeout_s: float = 0.5  # a request whose look-up takes longer is computed without
    call_timeout_s: float = 5.0  # of a call that loads or stores; then the service counts as lost
    lease_s: float = 30.0  # of the session that maps the memory
    shutdown_s: float = 5.0  # how long the end of vLLM waits for stores


def parse_settings(extra: Mapping[str, Any], load_failure_policy: str) -> Settings:
    """Raises WrongSettings."""
    types = {field.name: field.type for field in fields(Settings)}
    for name, value in extra.items():
        if name not in types:
            raise WrongSettings(f"kv_connector_extra_config has {name!r}; known are {', '.join(sorted(types))}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and 0 < value < 3600 if types[name] is float else type(value) is types[name]
        if not is_right:
            raise WrongSettings(f"kv_connector_extra_config: {name} cannot be {value!r}")
    if load_failure_policy != RECOMPUTE:
        # vLLM's default ends each request whose blocks could not be loaded with an error.
        raise WrongSettings(
            f'--kv-transfer-config needs "kv_load_failure_policy": "{RECOMPUTE}", so that a lost cache costs no request'
        )
    made = Settings(**extra)
    if not 0.5 <= made.lease_s <= 60:
        raise WrongSettings("kv_connector_extra_config: lease_s is 0.5 to 60")
    return made
