"""The settings of gRPC's own runtime that the services start with. Owns their choice; imports no grpc, which reads them once.

Chosen by measurement: with the event engine of grpcio 1.80 and later each message costs several wake-ups of threads. Without it
a streamed echo takes 0.7 of the time, and less of the processor. A test says when the installed grpcio is another one than was
measured, or no longer knows the names. A user's own environment wins.
"""

from collections.abc import MutableMapping

MEASURED_VERSION = "1.85"
EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def choose(environ: MutableMapping[str, str]) -> None:
    """Sets what is not set yet. Call it before grpc makes its first channel or server."""
    environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)
