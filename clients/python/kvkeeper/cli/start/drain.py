"""`kvkeeper drain`: asks the service at an address to stop, and returns when its process has ended; for preStop hooks.

Owns how the process is found: the kernel names the listener. So it works on the service's own host, for the service's own user,
and where containers share a PID namespace. Rule: a process is signalled through a descriptor of it, so that its number, used
again, leads to no other. A second signal would end a drain, so of several callers one alone may ask (--only-wait).
"""

import argparse
import os
import re
import select
import signal
import socket
from pathlib import Path

from kvkeeper.cli.console.problems import EXIT_DOWN, EXIT_FAILED, EXIT_OK, complain

_FRONT = b"kvkeeper.engine_service.serving.front_main"  # what a front process runs
_LISTENS = "0A"  # as /proc/net/tcp writes the state


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Asks the service that listens at ADDRESS to stop, as SIGTERM does, and waits until its process has ended:"
        " what runs goes on for its --drain-timeout. Exit code 3 where nothing listens there."
    )
    parser.add_argument("address", metavar="ADDRESS", help="host:port or unix:/path, on this host")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="to wait at most (default: %(default)g)")
    parser.add_argument("--only-wait", action="store_true", help="do not ask it to stop; another one does")


def run(args: argparse.Namespace) -> int:
    try:
        process = _process_at(args.address)
        if process is None:
            complain(f"nothing listens at {args.address}", reason="SERVICE_DOWN", is_json=False)
            return EXIT_DOWN
        if not args.only_wait:
            signal.pidfd_send_signal(process, signal.SIGTERM)
        return _wait(process, args.timeout)
    except ProcessLookupError:  # it ended meanwhile
        return EXIT_OK
    except PermissionError:
        complain(f"what listens at {args.address} belongs to another user", reason="PERMISSION_DENIED", is_json=False)
        return EXIT_FAILED
    except ValueError as error:
        args.usage_error(str(error))
        raise


def _wait(process: int, timeout_s: float) -> int:
    """Exit code. A descriptor of a process is readable once it has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if poll.poll(timeout_s * 1000):
        return EXIT_OK
    complain(f"it has not ended within {timeout_s:g} s", reason="DEADLINE_EXCEEDED", is_json=False)
    return EXIT_FAILED


def _process_at(address: str) -> int | None:
    """A descriptor of the process that listens; None: no process does.

    Raises ProcessLookupError, PermissionError, and ValueError for an address of another form.
    """
    host, _, port = address.rpartition(":")
    if not address.startswith("unix:") and not (host and re.fullmatch(r"\d{1,5}", port)):
        raise ValueError(f"ADDRESS: host:port or unix:/path, not {address!r}")
    owner = _owner(address)
    if owner is None:
        return None
    process = os.pidfd_open(owner)
    if _owner(address) != owner:  # it ended before the descriptor was there, which may be another's
        os.close(process)
        raise ProcessLookupError
    return process


def _owner(address: str) -> int | None:
    if address.startswith("unix:"):
        found = _owner_of_socket(address.removeprefix("unix:"))
    else:
        found = _owner_of_port(int(address.rpartition(":")[2]))
    return None if found is None else _find_service(found)


def _find_service(process: int) -> int:
    """The engine of a front process, which listens in its place; any other process itself. Raises ProcessLookupError."""
    try:
        if _FRONT not in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"):
            return process
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        raise ProcessLookupError from None
    return int(status.partition("\nPPid:")[2].split()[0])


def _owner_of_socket(path: str) -> int | None:
    """The process that listens at a Unix socket, as the kernel names it."""
    from kvkeeper.common.service.listen import get_peer

    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
            return get_peer(probe).process
        except PermissionError:
            raise
        except OSError:
            return None


def _owner_of_port(port: int) -> int | None:
    """The process that listens at a TCP port. Raises PermissionError where another user's does."""
    sockets = {f"socket:[{number}]" for table in ("tcp", "tcp6") for number in _listeners(Path("/proc/net") / table, port)}
    if not sockets:
        return None
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(entry) in sockets for entry in (folder / "fd").iterdir()):
                return int(folder.name)
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's, or one that ended
    raise PermissionError


def _listeners(table: Path, port: int) -> list[str]:
    """Numbers of the sockets that listen at the port."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except FileNotFoundError:  # a host without IPv6
        return []
    return [row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]
