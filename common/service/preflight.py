"""What can be known to be wrong before a service loads anything: its addresses.

It only looks: another process may take an address between this check and the start, which then reports it.
"""

from kvkeeper.common.service.listen import AddressInUse, SocketLock, check_port, socket_path
from kvkeeper.common.service.process import StartError


def check_addresses(listen: str, metrics_listen: str, health_address: str) -> None:
    """Checks that no process serves at any of them. Raises StartError."""
    for name, address in (("listen", listen), ("metrics-listen", metrics_listen), ("health-address", health_address)):
        try:
            if address:
                _check_free(address)
        except AddressInUse as error:
            raise StartError(f"--{name} {address}: {error}") from None
    taken = {listen: "--listen"}
    for name, address in (("--metrics-listen", metrics_listen), ("--health-address", health_address)):
        if address in taken and not address.endswith(":0"):
            raise StartError(f"{name} {address}: an address of its own, {taken[address]} has this one")
        if address:
            taken[address] = name


def _check_free(address: str) -> None:
    """Raises AddressInUse where it is not."""
    path = socket_path(address)
    if path is not None:
        SocketLock(path).release()
        return
    host, _, port = address.rpartition(":")
    if port != "0":
        check_port(host.strip("[]"), int(port))
