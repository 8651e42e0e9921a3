"""What can be known to be wrong before a service loads anything: its addresses.

A look, not a claim: between it and the real start another process may take an address, which is then told as well, only later.
"""

from kvkeeper.service.listen import AddressInUse, SocketLock, check_port, socket_path
from kvkeeper.service.process import StartError


def check_addresses(listen: str, metrics_listen: str) -> None:
    """That no process serves there. Raises StartError."""
    for name, address in (("listen", listen), ("metrics-listen", metrics_listen)):
        try:
            if address:
                _check_free(address)
        except AddressInUse as error:
            raise StartError(f"--{name} {address}: {error}") from None
    if metrics_listen == listen and not listen.endswith(":0"):
        raise StartError(f"--metrics-listen {metrics_listen}: an address of its own, --listen has this one")


def _check_free(address: str) -> None:
    """Raises AddressInUse."""
    path = socket_path(address)
    if path is not None:
        SocketLock(path).release()
        return
    host, _, port = address.rpartition(":")
    if port != "0":
        check_port(host.strip("[]"), int(port))
