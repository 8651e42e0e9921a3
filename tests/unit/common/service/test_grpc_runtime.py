"""gRPC's own settings still hold for the installed grpcio; no times are taken here."""

import os
import subprocess
import sys
from importlib.metadata import version

from kvkeeper.common.service.grpc_runtime import EXPERIMENTS, MEASURED_VERSION, choose

_SERVE = """
import sys
from types import SimpleNamespace
from kvkeeper.common.service import grpc_runtime
from kvkeeper.common.service.process import run

grpc_runtime.EXPERIMENTS = sys.argv[1]

async def serve(config):
    import grpc.aio
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(None)

config = SimpleNamespace(log_level="info", trace_endpoint="")
sys.exit(run("kvkeeper test", lambda argv, environ: config, serve, [], lambda config: None))
"""


def told_by_grpc(choice: str) -> str:
    """The log of gRPC in a process that serves as a service does, with this choice."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", _SERVE, choice],
        env={**kept, "PYTHONPATH": ":".join(sys.path), "GRPC_VERBOSITY": "ERROR"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_choice_was_measured_on_the_installed_version() -> None:
    """Where this fails: run tests/benchmarks/echo_server.py with and without EXPERIMENTS, and note version and choice."""
    assert version("grpcio").startswith(f"{MEASURED_VERSION}.")


def test_grpc_knows_the_names_and_a_service_hands_them_over_in_time() -> None:
    assert "unknown experiment" not in told_by_grpc(EXPERIMENTS).lower()
    assert "unknown experiment: no_such_engine" in told_by_grpc("-no_such_engine").lower()  # so it would say so


def test_a_setting_of_the_user_stays() -> None:
    environ = {"GRPC_EXPERIMENTS": "mine"}
    choose(environ)
    assert environ == {"GRPC_EXPERIMENTS": "mine"}
