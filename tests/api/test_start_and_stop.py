"""Starting, refusing to start, and leaving nothing behind: real services as processes of their own."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache.v1 import cache_service_pb2_grpc as pb_grpc
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.rpc import session_calls
from kvkeeper.cache_service.server import start_server
from kvkeeper.client import AsyncCacheClient, KvkeeperError
from kvkeeper.common.service.listen import is_of_this_host
from tests.support.worlds.cache_api import DEADLINE, SPEC

ROOT = Path(__file__).parents[2]
SMALL = ("--pool-memory", "64KiB", "--num-pools", "1")


class Services:
    """Starts cache services, and ends those that a test left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[subprocess.Popen[str]] = []

    def start(self, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvkeeper.cache_service", "--runtime-dir", str(self.folder / "run"), *SMALL, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._all.append(process)
        return process

    def ready(self, *flags: str) -> tuple[subprocess.Popen[str], str]:
        """The process, and the address that its log tells."""
        process = self.start(*flags)
        assert process.stderr is not None
        line = process.stderr.readline()
        event = json.loads(line)
        assert event["event"] == "ready", line
        return process, event["address"]

    def refused(self, *flags: str) -> str:
        """The one line of a service that does not start."""
        output, error = self.start(*flags).communicate(timeout=DEADLINE)
        assert output == ""
        (line,) = error.splitlines()
        return line

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


@pytest.fixture
def services() -> Iterator[Services]:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        started = Services(Path(folder))
        yield started
        started.end()


def open_session(address: str) -> pb.OpenSessionResponse:
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.CacheServiceStub(channel)  # type: ignore[no-untyped-call]
        return stub.OpenSession(pb.OpenSessionRequest(spec=SPEC), timeout=DEADLINE, wait_for_ready=True)


@pytest.mark.parametrize("is_near", [True, False])
async def test_only_a_caller_of_the_same_host_learns_of_the_attach_socket(
    is_near: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers: list[str] = []

    def judged(peer: str) -> bool:
        peers.append(peer)
        return is_near and is_of_this_host(peer)

    monkeypatch.setattr(session_calls, "is_of_this_host", judged)
    server = await start_server(CacheConfig(listen="127.0.0.1:0", runtime_dir=tmp_path / "r", num_blocks=16, drain_timeout=0.0))
    try:
        async with AsyncCacheClient(server.address) as client:
            session = await client.open_session(SPEC)
            opened = session._opened
            told = [bool(opened.attach_socket_path), bool(opened.attach_token), opened.offers_step_lane]
            assert told == [is_near] * 3
            assert str(tmp_path) not in str(opened) or is_near
            if is_near:
                (await session.attach()).close()
            else:
                with pytest.raises(KvkeeperError, match="another host"):
                    await session.attach()
                assert not await session.attach_step_lane()
            await session.close()
    finally:
        await server.stop()
    assert [peer.startswith("ipv4:127.0.0.1:") for peer in peers] == [True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_nothing_is_left(services: Services, number: signal.Signals) -> None:
    process, address = services.ready("--listen", f"unix:{services.folder}/s", "--drain-timeout", "0.01")
    opened = open_session(address)
    assert Path(opened.attach_socket_path).is_socket()
    assert Path(opened.attach_socket_path).stat().st_mode & 0o777 == 0o600
    assert (services.folder / "s").stat().st_mode & 0o777 == 0o600
    process.send_signal(number)
    output, error = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (0, "")
    events = [json.loads(line)["event"] for line in error.splitlines()]
    assert events == ["pool_made", "session_opened", "drain_timeout", "stopped"]
    assert opened.attach_token not in error
    left = [path.name for path in services.folder.rglob("*") if not path.is_dir()]
    assert left == ["epoch"], "which the next run goes on from"


def test_a_second_signal_ends_the_draining(services: Services) -> None:
    process, address = services.ready("--listen", f"unix:{services.folder}/s", "--drain-timeout", "3600")
    open_session(address)
    process.send_signal(signal.SIGTERM)
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        states = (state.status for state in stub.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE))
        assert health_pb2.HealthCheckResponse.NOT_SERVING in states
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 0


@pytest.mark.parametrize("kind", ["port", "socket"])
def test_two_services_cannot_have_one_address(services: Services, kind: str) -> None:
    listen = "127.0.0.1:0" if kind == "port" else f"unix:{services.folder}/s"
    first, address = services.ready("--listen", listen)
    line = services.refused("--listen", address)
    assert line.startswith("kvkeeper cache: ")
    assert address.removeprefix("unix:") in line
    assert first.poll() is None
    assert open_session(address).session_id  # the first one serves on


def test_what_a_killed_service_left_is_cleared_away(services: Services) -> None:
    listen = f"unix:{services.folder}/s"
    first, _ = services.ready("--listen", listen)
    first.kill()
    first.communicate()
    assert (services.folder / "s").is_socket()
    _, address = services.ready("--listen", listen)
    assert open_session(address).session_id


def test_a_socket_of_another_program_is_left_alone(services: Services) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(services.folder / "s"))
        other.listen()
        assert "listens on" in services.refused("--listen", f"unix:{services.folder}/s")
        assert (services.folder / "s").is_socket()


@pytest.mark.parametrize("memory", ["4096GiB", "64TiB"])
def test_more_memory_than_the_machine_has_is_refused(services: Services, memory: str) -> None:
    listen = f"unix:{services.folder}/s"
    line = services.refused("--listen", listen, "--pool-memory", memory)
    assert "--pool-memory" in line
    services.ready("--listen", listen)  # and everything was undone


@pytest.mark.parametrize(("limit", "size"), [("RLIMIT_FSIZE", 1 << 16), ("RLIMIT_AS", 8 << 30)])
def test_more_memory_than_the_process_may_have_is_refused(services: Services, limit: str, size: int) -> None:
    limited = f"import resource, sys; resource.setrlimit(resource.{limit}, ({size}, {size}))\n"
    limited += "from kvkeeper.cache_service.__main__ import main; sys.exit(main())"
    flags = ["--listen", "127.0.0.1:0", "--runtime-dir", str(services.folder / "run"), "--num-pools", "1"]
    command = [sys.executable, "-c", limited, *flags, "--pool-memory", str(size + 4096)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "--pool-memory" in done.stderr
