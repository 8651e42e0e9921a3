"""`kvkeeper hold`: holds descriptors until SIGTERM or SIGINT; or asks the holder that runs.

Exit codes: 0 stopped when asked, or got a reply; 1 could not start, or refused; 2 wrong configuration; the last two with one
line on stderr.
"""

import os
import signal
import sys
from collections.abc import Sequence

from kvkeeper.common.hold.client import HolderAway, HolderClient
from kvkeeper.common.hold.config import SOURCE, HoldConfig
from kvkeeper.common.hold.holder import Holder
from kvkeeper.common.hold.messages import HoldRefused
from kvkeeper.common.hold.systemd import SystemdStore
from kvkeeper.common.service import log, output
from kvkeeper.common.service.config import ConfigError
from kvkeeper.common.service.listen import AddressInUse, socket_path


def main(argv: Sequence[str] | None = None) -> int:
    """argv without the program's name."""
    with output.queued():
        return _run(sys.argv[1:] if argv is None else argv)


def _run(argv: Sequence[str]) -> int:
    try:
        config = SOURCE.load(argv, os.environ)
    except ConfigError as error:
        print(f"kvkeeper hold: {error}", file=sys.stderr)
        return 2
    if config.show or config.drop:
        return _ask(config)
    log.configure(config.log_level, "hold")
    path = socket_path(config.listen)
    assert path is not None, "checked by the config"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        holder = Holder(path, config.max_held, SystemdStore(os.environ))
    except OSError as error:
        print(f"kvkeeper hold: --listen {config.listen}: {error.strerror}", file=sys.stderr)
        return 1
    except AddressInUse as error:
        print(f"kvkeeper hold: --listen {config.listen}: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: holder.stop())
    holder.serve()
    return 0


def _ask(config: HoldConfig) -> int:
    """Asks the holder at the address."""
    try:
        with HolderClient(config.listen) as client:
            if config.drop:
                client.drop(config.drop)
            if config.show:
                for name, num_bytes in client.held().items():
                    print(f"{name}\t{num_bytes}")
    except (HolderAway, HoldRefused) as error:
        print(f"kvkeeper hold: --listen {config.listen}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
