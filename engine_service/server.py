"""Puts the engine service together and takes it apart again.

Owns the order: load the model, listen, open a session, say SERVING; and backwards: refuse new requests, let running
ones end, unmap and close the session, end streams, remove the socket. A start that fails is a StartError of one line,
with everything undone.
"""

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine_service.config import EngineConfig
from engine_service.door import MAX_PROMPT_MESSAGE_BYTES, SERVICE, Door
from engine_service.engine import Engine
from engine_service.errors import ModelError
from engine_service.listen import AddressInUse, SocketLock
from engine_service.refusals import Draining
from engine_service.served_model import ServedModel, load_served_model
from engine_service.service import EngineService
from engine_service.serving import CacheServiceRefused, keep_serving
from kvkeeper.client.cache import AsyncCacheClient

log = structlog.get_logger()
HealthServicer: Any = health.aio.HealthServicer  # type: ignore[attr-defined]

_LAST_STEP_S = 5.0  # for what computes when everything else has ended
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # two services on one port would share its connections at random
    ("grpc.max_receive_message_length", MAX_PROMPT_MESSAGE_BYTES + 4096),  # past the door's limit, which tells its reason
]


class StartError(Exception):
    """The service cannot run as configured. One line, which names the flag or the address."""


@dataclass(slots=True, eq=False)
class RunningServer:
    """An engine service that listens. address is what a client's channel takes."""

    address: str
    engine: Engine
    config: EngineConfig
    _serving: asyncio.Task[None]
    _ready: asyncio.Event
    _grpc: grpc.aio.Server
    _client: AsyncCacheClient
    _health: HealthServicer
    _lock: SocketLock | None
    _is_stopped: bool = False

    async def wait_ready(self) -> None:
        """Until there is a session. Raises StartError when the cache service refuses the model."""
        waiting = asyncio.create_task(self._ready.wait())
        await asyncio.wait((waiting, self._serving), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._serving.done():
            await self.wait_end()

    async def wait_end(self) -> None:
        """Until serving has ended. Raises StartError when the cache service refuses the model."""
        try:
            await asyncio.shield(self._serving)
        except CacheServiceRefused as error:
            raise StartError(f"--cache {self.config.cache}: {error}") from None

    async def drain(self) -> None:
        """Take no more requests, and let the live ones end, but no longer than configured."""
        await self._health.enter_graceful_shutdown()
        self.engine.stop()
        done, _ = await asyncio.wait((self._serving,), timeout=self.config.drain_timeout)
        if not done:
            log.warning("drain_timeout", num_requests=len(self.engine.generations))

    async def stop(self) -> None:
        """End what still runs, close the session and remove the socket. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.engine.stop()
        self.engine.fail_all(Draining("the service is stopping"))
        await asyncio.wait((self._serving,), timeout=_LAST_STEP_S)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self._grpc.stop(grace=0.2)
        await self._client.close()
        self.engine.close()
        if self._lock is not None:
            self._lock.release()
        log.info("stopped")


async def start_server(config: EngineConfig, *, model: ServedModel | None = None) -> RunningServer:
    """A service that listens and looks for its session. model is for tests. Raises StartError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    lock: SocketLock | None = None
    server = grpc.aio.server(options=_OPTIONS)
    try:
        served = model if model is not None else await asyncio.to_thread(load_served_model, config)
        if config.socket_path is not None:
            lock = SocketLock(config.socket_path)
        address = _bind(server, config)
        engine = Engine(config.max_waiting)
        server.add_generic_rpc_handlers((Door(EngineService(config, served, engine)),))
        health_servicer = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        if config.reflection:
            names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        await _set_health(health_servicer, is_serving=False)
        await server.start()
    except BaseException as error:
        await server.stop(grace=None)
        if lock is not None:
            lock.release()
        if isinstance(error, ModelError):
            raise StartError(f"--model {config.model}: {error}") from None
        if isinstance(error, AddressInUse):
            raise StartError(f"--listen {config.listen}: {error}") from None
        raise
    ready = asyncio.Event()

    async def tell(has_session: bool) -> None:
        await _set_health(health_servicer, is_serving=has_session)
        if has_session:
            log.info("ready", address=address, model=served.model_id)
            ready.set()

    client = AsyncCacheClient(config.cache)
    serving = asyncio.create_task(keep_serving(engine, client, served, config, tell))
    return RunningServer(address, engine, config, serving, ready, server, client, health_servicer, lock)


def _bind(server: grpc.aio.Server, config: EngineConfig) -> str:
    """Bind the listen address, a Unix socket for its owner only. Raises StartError."""
    old_mask = os.umask(0o177)
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError:
        raise StartError(f"--listen {config.listen}: the address is in use or cannot be had") from None
    finally:
        os.umask(old_mask)
    return config.listen if config.socket_path is not None else f"{config.listen.rpartition(':')[0]}:{port}"


async def _set_health(servicer: HealthServicer, *, is_serving: bool) -> None:
    statuses = health_pb2.HealthCheckResponse
    for name in ("", SERVICE.full_name):
        await servicer.set(name, statuses.SERVING if is_serving else statuses.NOT_SERVING)
