"""The process that has the client of a Mooncake store: `python -m ... STAGING LINK HOST PORT MEMORY`.

A process of its own, because the library is not at home in one that others depend on: its calls wait for as long as they like,
and it may end its process by a signal when its master is away. STAGING is a descriptor of the memory that values are moved
through, LINK one of a socket on which each message is a request or an answer, in JSON. Each request has a thread, so that one
that waits holds up no other; its answer may come when no call waits for it any more. The process ends when the socket does.
"""

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from mooncake.store import MooncakeDistributedStore

from kvkeeper.common.service.threads import NoThread, start_thread

from .mooncake_link import Request

_LOCAL_BYTES = 16 << 20  # of the library, for small values
_CLOSE_SECONDS = 2.0


def main(staging: int, link: int, host: str, port: int, memory: int) -> None:
    """Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the service says when it is time
    shared = mmap.mmap(staging, 0)
    store, address = MooncakeDistributedStore(), _get_address(shared)
    if store.setup(_own_host(host, port), "P2PHANDSHAKE", memory, _LOCAL_BYTES, "tcp", "", f"{host}:{port}"):
        os._exit(1)
    if store.register_buffer(address, len(shared)):
        os._exit(1)
    connection, sending = Connection(link), threading.Lock()

    def run(request: Request) -> None:
        try:
            answer: Any = _CALLS[request["call"]](store, request, address)
        except Exception:  # of the library: no answer
            answer = None
        with sending:
            connection.send_bytes(json.dumps({"id": request["id"], "answer": answer}).encode())

    try:
        while True:
            request = json.loads(connection.recv_bytes())
            try:
                start_thread(threading.Thread(target=run, args=(request,), daemon=True))
            except NoThread:  # later requests wait for this one
                run(request)
    except (EOFError, OSError):
        closing = threading.Thread(target=store.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        os._exit(0)


def _places(request: Request, address: int) -> tuple[list[str], list[int], list[int]]:
    names, size = request["names"], request["size"]
    return names, [address + request["at"] + size * place for place in range(len(names))], [size] * len(names)


def _get(store: Any, request: Request, address: int) -> list[int]:
    return list(store.batch_get_into(*_places(request, address)))


def _put(store: Any, request: Request, address: int) -> list[int]:
    return list(store.batch_put_from(*_places(request, address)))


def _are_there(store: Any, request: Request, _: int) -> list[int]:
    return list(store.batch_is_exist(request["names"]))


def _delete(store: Any, request: Request, _: int) -> list[int]:
    return [store.remove(name, True) for name in request["names"]]


def _small(store: Any, request: Request, _: int) -> str:
    return bytes(store.get(request["names"][0])).hex()


def _set_small(store: Any, request: Request, _: int) -> int:
    call = store.upsert if request["replaces"] else store.put  # where there is one, put leaves it
    return int(call(request["names"][0], bytes.fromhex(request["value"])))


_CALLS: dict[str, Callable[[Any, Request, int], Any]] = {
    "get": _get,
    "put": _put,
    "are_there": _are_there,
    "delete": _delete,
    "small": _small,
    "set_small": _set_small,
}


def _get_address(shared: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(shared))


def _own_host(host: str, port: int) -> str:
    """The address of this machine in the network of the master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect((host, port))  # sends nothing
        return str(link.getsockname()[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
