"""What can be known to be wrong before a service loads anything: its addresses.

It only looks: another process may take an address between this check and the start, which then reports it.
"""

from kvkeeper.service.listen import AddressInUse, SocketLock, check_port, socket_path
from kvkeeper.service.process import StartError


def check_addresses(listen: str, metrics_listen: str) -> None:
    """Checks that no process serves at either address. Raises StartError."""
    for name, address in (("listen", listen), ("metrics-listen", metrics_listen)):
        try:
            if address:
                _check_free(address)
        except AddressInUse as error:
            raise StartError(f"--{name} {address}: {error}") from None
    if metrics_listen == listen and not listen.endswith(":0"):
        raise StartError(f"--metrics-listen {metrics_listen}: an address of its own, --listen has this one")


def _check_free(address: str) -> None:
    """Raises AddressInUse where it is not."""
    path = socket_path(address)
    if path is not None:
        SocketLock(path).release()
        return
    host, _, port = address.rpartition(":")
    if port != "0":
        check_port(host.strip("[]"), int(port))
