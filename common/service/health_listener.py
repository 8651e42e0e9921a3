"""HealthListener: a second address that answers grpc.health.v1 and nothing else, for probes that have no credentials.

Whatever its caller asks, it tells only whether the service serves: the statuses are those of the service's own address, from
one servicer. So any host may reach it. It is bounded by itself: few connections, each ended after a while, small messages.
"""

from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from kvkeeper.common.service.listen import AddressInUse, check_port
from kvkeeper.common.service.process import StartError

_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    ("grpc.max_receive_message_length", 1024),  # a request is the name of a service
    ("grpc.max_metadata_size", 4096),
    ("grpc.max_allowed_incoming_connections", 64),
    ("grpc.max_concurrent_streams", 8),
    # A connection that watches or rests makes room for a probe: its client asks again.
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 1_000),
]


class HealthListener:
    """A server of health at host:port. address tells the port where 0 was asked for. Has to be made on the running loop."""

    def __init__(self, listen: str, servicer: Any) -> None:
        """No call is answered yet. Raises StartError."""
        host, _, number = listen.rpartition(":")
        self._server = grpc.aio.server(options=_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        try:
            if number != "0":
                check_port(host.strip("[]"), int(number))
            port = self._server.add_insecure_port(listen)
        except AddressInUse as error:
            raise StartError(f"--health-address {listen}: {error}") from None
        except (RuntimeError, OSError):
            raise StartError(f"--health-address {listen}: the address is in use or cannot be had") from None
        self.address = f"{host}:{port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Ends every call."""
        await self._server.stop(grace=None)
