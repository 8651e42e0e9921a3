"""Configuration of the holder: one frozen value, made here from flags over environment over defaults."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeeper.common.hold.messages import MAX_HELD, is_name
from kvkeeper.common.service.config import ConfigSource
from kvkeeper.common.service.settings import HOLDER_ADDRESS, Check, between, check_settings, log_level_setting, setting


def _default_address() -> str:
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "kvkeeper" if base else Path(tempfile.gettempdir()) / f"kvkeeper-{os.getuid()}"
    return f"unix:{folder}/hold.sock"


@dataclass(frozen=True, slots=True)
class HoldConfig:
    """Everything that is decided before the holder starts. Raises ConfigError for a value out of its range."""

    listen: str = setting(
        default_factory=_default_address,
        group="Addresses",
        help="unix:/path, the socket on which cache services hand descriptors over",
        default_text="unix:$XDG_RUNTIME_DIR/kvkeeper/hold.sock, or in a private temporary folder",
        check=HOLDER_ADDRESS,
        details="It has mode 0600. Its folder is made with mode 0700.",
    )
    max_held: int = setting(64, group="Bounds", help="most descriptors, one for each pool", check=between(1, MAX_HELD))
    show: bool = setting(
        False, group="Asking", help="print what the holder at --listen has, a name and its bytes a line, and end"
    )
    drop: str = setting(
        "",
        group="Asking",
        help="name of what the holder at --listen is to drop, as --show tells it; then end",
        default_text="nothing",
        check=Check("a name", lambda name: None if not name or is_name(name) else "a name as --show tells it"),
        details="The memory goes once no process maps it.",
    )
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        check_settings(self)


SOURCE = ConfigSource(
    HoldConfig,
    program="kvkeeper hold",
    description="Holds the device memory of a cache service that is away.",
    environment_prefix="KVKEEPER_HOLD_",
    example="MAX_HELD=8",
)


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> HoldConfig:
    """Flags over KVKEEPER_HOLD_* over defaults. Raises ConfigError; --help ends in argparse's SystemExit."""
    return SOURCE.load(argv, environ)
