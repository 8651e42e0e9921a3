"""Puts the cache service together and takes it apart again.

Owns the order: listen, then reserve memory (whoever calls meanwhile is told to wait), then say SERVING; and backwards:
refuse new sessions, wait for live ones to close, end streams, remove sockets. One loop runs all of it. A start that fails is
a StartError of one line, with everything undone.
"""

import asyncio
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cache_service.arena.attach import AttachServer
from cache_service.arena.memory_limit import OutOfMemory
from cache_service.arena.shared_memory import SharedMemoryArena
from cache_service.config import CacheConfig
from cache_service.door import MAX_PROMPT_MESSAGE_BYTES, SERVICE, Door
from cache_service.keeper import Clock, Keeper
from cache_service.listen import AddressInUse, SocketLock, check_port, private_directory
from cache_service.registry import Allocate, PoolRegistry
from cache_service.service import CacheService
from cache_service.steps import StepHandler

log = structlog.get_logger()
HealthServicer: Any = health.aio.HealthServicer  # type: ignore[attr-defined]

_OPTIONS = [
    ("grpc.so_reuseport", 0),  # two services on one port would share its connections at random
    ("grpc.max_receive_message_length", MAX_PROMPT_MESSAGE_BYTES + 4096),  # past the door's own limit, which tells its reason
]


class StartError(Exception):
    """The service cannot run as configured. One line, which names the flag or the address."""


@dataclass(slots=True, eq=False)
class RunningServer:
    """A cache service that answers. address is what a client's channel takes."""

    address: str
    attach_path: Path
    keeper: Keeper
    drain_timeout: float
    _grpc: grpc.aio.Server
    _attach: AttachServer
    _health: HealthServicer
    _lock: SocketLock | None
    _is_stopped: bool = False

    async def drain(self) -> None:
        """Refuses new sessions, and waits for the live ones to close, but no longer than configured."""
        self.keeper.is_draining = True
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(self.drain_timeout):
                await self.keeper.no_session.wait()
        except TimeoutError:
            log.warning("drain_timeout", num_sessions=len(self.keeper.sessions))

    async def stop(self) -> None:
        """Ends what still runs, gives the memory back and removes the sockets. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.keeper.is_draining = True
        self.keeper.stop()
        await self._grpc.stop(grace=0.2)
        await self._attach.close()
        self.keeper.registry.close()
        if self._lock is not None:
            self._lock.release()
        log.info("stopped")


async def start_server(
    config: CacheConfig, *, clock: Clock | None = None, allocate: Allocate = SharedMemoryArena
) -> RunningServer:
    """A service that is SERVING. clock and allocate are for tests. Raises StartError."""
    lock: SocketLock | None = None
    attach: AttachServer | None = None
    server = grpc.aio.server(options=_OPTIONS)
    registry = PoolRegistry(config, allocate)
    try:
        if config.socket_path is not None:
            lock = SocketLock(config.socket_path)
        address = _bind(server, config)
        # Microseconds since 1970 as the first epoch: larger than any that an earlier run counted up to.
        keeper = Keeper(registry, clock or asyncio.get_running_loop(), time.time_ns() // 1000, config.max_sessions)
        attach = AttachServer(_attach_path(config, address), keeper)
        server.add_generic_rpc_handlers((Door(CacheService(config, keeper, str(attach.path)), StepHandler(keeper)),))
        health_servicer = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
        if config.reflection:
            names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        await server.start()
        await registry.reserve()
        await _set_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
    except BaseException as error:
        await server.stop(grace=None)
        if attach is not None:
            await attach.close()
        if lock is not None:
            lock.release()
        if isinstance(error, AddressInUse | OutOfMemory):
            raise StartError(str(error)) from None
        raise
    log.info("ready", address=address, num_pools=config.num_pools, pool_memory=config.pool_memory)
    return RunningServer(address, attach.path, keeper, config.drain_timeout, server, attach, health_servicer, lock)


def _bind(server: grpc.aio.Server, config: CacheConfig) -> str:
    """Binds the listen address, a Unix socket for its owner only. Raises StartError, AddressInUse."""
    host, _, number = config.listen.rpartition(":")
    if config.socket_path is None and number != "0":
        check_port(host.strip("[]"), int(number))
    old_mask = os.umask(0o177)
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError:
        raise StartError(f"--listen {config.listen}: the address is in use or cannot be had") from None
    finally:
        os.umask(old_mask)
    return config.listen if config.socket_path is not None else f"{host}:{port}"


def _attach_path(config: CacheConfig, address: str) -> Path:
    """One attach socket per address, so that a service that died is followed by one that removes its socket."""
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    return private_directory(config.runtime_dir) / f"attach-{name}.sock"


async def _set_health(servicer: HealthServicer, status: int) -> None:
    for name in ("", SERVICE.full_name):
        await servicer.set(name, status)
