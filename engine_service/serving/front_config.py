"""FrontConfig: what fronts need of the engine's configuration; bounds of the whole address are divided among them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PATHS = ("tls_cert", "tls_key", "tls_client_ca", "auth_tokens")


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """Names are those of EngineConfig. Knows of no other engine and of no cache service."""

    listen: str  # with the port that was taken
    connections: int
    connection_calls: int
    receive_memory: int
    message_bytes: int  # of a message with a prompt
    receive_seconds: float
    many_calls: int
    stream_interval_ms: float
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    auth_tokens: Path | None
    reflection: bool
    has_gateway: bool

    def to_json(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> "FrontConfig":
        """What to_json gave."""
        values: dict[str, Any] = {name: Path(value) if name in _PATHS and value else value for name, value in told.items()}
        return cls(**values)
