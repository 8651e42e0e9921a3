"""The gateway as a process: the program `smg`, which speaks HTTP with clients and our engine's gateway protocol with us.

It serves this host alone, its metrics too. `python -m kvkeeper.cli.start.gateway FLAG...` asks the kernel to end it with its
parent, and runs it in this process, without the drawing that it begins with. Its warnings and errors are logged, as JSON where
our stderr is no terminal.
"""

import os
import sys
from collections.abc import Sequence

from kvkeeper.cli.start.services import end_with_parent

MODULE = "smg"
PROBE = "/readiness"  # succeeds once it serves a model and has its tokenizer; it does not log a probe
# An engine that was started again has its requests within seconds, not minutes.
_WATCHFUL = ("--health-check-interval-secs", "2", "--health-success-threshold", "1", "--cb-timeout-duration-secs", "2")
# What it logs, by its own parts: warnings, but not that it asks no caller for a credential, which is so on this host, nor what
# it lacks for images, which no model here takes, nor each try to fetch a tokenizer, whose last failure is logged as an error.
_LOGGED = "warn,smg::posture=error,smg::routers::grpc::multimodal=error,smg::workflow::tokenizer_registration=off,wfaas=error"


def flags(http: str, engine: str, typed: Sequence[str]) -> list[str]:
    """Flags of the gateway, those that were typed last. http: its own address; engine: that of the engine service."""
    host, _, port = http.rpartition(":")
    known = ("--host", host.strip("[]"), "--port", port, "--worker-urls", f"grpc://{engine}", "--prometheus-host", "127.0.0.1")
    form = [] if sys.stderr.isatty() else ["--log-json"]
    return [*known, *_WATCHFUL, *form, *typed]


def main(argv: Sequence[str]) -> None:
    if not end_with_parent():
        sys.exit(1)
    from smg import cli, launch_router

    launch_router.print_banner = lambda *_: None
    if not any(word.startswith("--log-level") for word in argv):
        os.environ.setdefault("RUST_LOG", _LOGGED)
    sys.argv = [MODULE, "launch", *argv]
    cli.main()


if __name__ == "__main__":
    main(sys.argv[1:])
