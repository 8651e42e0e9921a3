"""Puts the cache service together and takes it apart again.

Owns the order of both. Start: listen, reserve memory (calls that come meanwhile are refused with a retry delay), say SERVING.
Stop: refuse new sessions, wait for the live ones to close, end streams, remove sockets. All of it runs on one loop. A start
that fails raises a StartError of one line, with everything undone.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy.ma  # noqa: F401  numpy loads it at the first set operation, which would hold up all steps for 0.1 s
import structlog

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.service.endpoint import Endpoint
from kvkeeper.common.service.listen import AddressInUse
from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.methods import max_prompt_message_bytes
from kvkeeper.common.service.process import StartError
from kvkeeper.common.trust.guard import Guard

from .config import CacheConfig
from .memory.attach_server import AttachServer
from .memory.disk.disk_directory import DiskDirectory, DiskRefused
from .memory.first_epoch import first_epoch
from .memory.kept.memory_directory import MemoryDirectory, MemoryRefused
from .memory.predecessor import end_predecessor
from .memory.private_file import private_directory
from .memory.remote.open_remote import RemoteMaker, RemoteRefused, open_remote
from .memory.select_memory import make_kept_memory, make_memory
from .rpc.create_handler import CreateHandler
from .rpc.eviction_calls import EvictionCalls
from .rpc.inspection_calls import InspectionCalls
from .rpc.kv_calls import KvCalls
from .rpc.lane_calls import LaneCalls
from .rpc.methods import get_handlers, max_message_bytes, register
from .rpc.one_item_session import OneItemSessions
from .rpc.prefix_calls import PrefixCalls
from .rpc.sequence_calls import SequenceCalls
from .rpc.session_calls import SessionCalls
from .rpc.step_handler import StepHandler
from .rpc.step_lane import StepLanes
from .rpc.step_stream import StepStreams
from .rpc.watch_streams import WatchStreams
from .runtime.arena_supply import Memory
from .runtime.clock import Clock, StallFreeClock
from .runtime.pool_registry import PoolRegistry
from .runtime.session_manager import SessionManager

if TYPE_CHECKING:
    from kvkeeper.common.service.metrics import MetricsServer

log = structlog.get_logger()

_END_SECONDS = 30.0  # that a service may take to end after its drain, which is as long as this one's


@dataclass(slots=True, eq=False)
class RunningServer:
    """A cache service that serves calls. address is the target of a client's channel."""

    attach_path: Path
    session_manager: SessionManager
    drain_timeout: float
    guard: Guard
    _endpoint: Endpoint
    _attach: AttachServer
    metrics: "MetricsServer | None" = None
    _clock: StallFreeClock | None = None  # the server's own, where none was handed in
    _directory: MemoryDirectory | None = None
    _disks: DiskDirectory | None = None
    _is_stopped: bool = False

    @property
    def address(self) -> str:
        return self._endpoint.address

    async def drain(self) -> None:
        """Refuses new sessions, and waits up to the drain timeout for the live ones to close."""
        self.session_manager.start_draining()
        await self._endpoint.drain()
        try:
            async with asyncio.timeout(self.drain_timeout):
                await self.session_manager.no_session.wait()
        except TimeoutError:
            log.warning("drain_timeout", num_sessions=len(self.session_manager.sessions))

    async def stop(self) -> None:
        """Ends streams and calls, gives the memory back and removes the sockets. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.session_manager.start_draining()
        self.session_manager.stop()
        if self.metrics is not None:
            await self.metrics.stop()
        await self._endpoint.stop()
        await self._attach.close()
        self.session_manager.registry.close()
        if self._directory is not None:
            self._directory.close()
        if self._disks is not None:
            self._disks.close()
        self._endpoint.release()
        if self._clock is not None:
            self._clock.close()
        log.info("stopped")


async def take_over(config: CacheConfig) -> None:
    """Ends the service that has the memory directory. Its addresses and its memory are free then. Raises StartError."""
    assert config.memory_dir is not None, "checked by the config"
    try:
        await end_predecessor(config.memory_dir, config.drain_timeout + _END_SECONDS)
    except MemoryRefused as error:
        raise StartError(f"--take-over: {error}") from None


async def start_server(
    config: CacheConfig, *, clock: Clock | None = None, memory: Memory | None = None, owns_process: bool = False
) -> RunningServer:
    """A service that is SERVING. clock and memory are for tests. owns_process: see PoolRegistry. Raises StartError."""
    endpoint: Endpoint | None = None
    attach: AttachServer | None = None
    metrics: MetricsServer | None = None
    directory: MemoryDirectory | None = None
    disks: DiskDirectory | None = None
    loop = asyncio.get_running_loop()
    own_clock = StallFreeClock(loop) if clock is None else None
    timing: Clock = clock or own_clock or loop
    try:
        watch_streams = WatchStreams()
        directory = _open_memory_directory(config)
        if config.disk_path is not None:
            disks = DiskDirectory(config.disk_path, config.disk_memory, config.num_pools)
        kinds, remote = memory or make_memory(config.device), _make_remote(config)
        registry = PoolRegistry(
            config, kinds, watch_streams.note_replaced, directory, disks, timing.time, remote, owns_process=owns_process
        )
        most_bytes = max_message_bytes(config.max_sequences)
        guard = Guard(config)
        largest_bytes = max(most_bytes, max_prompt_message_bytes(config.most_tokens))
        endpoint = await Endpoint.open(config.listen, largest_bytes, guard=guard)
        if config.health_address:
            endpoint.open_health(config.health_address)
        epoch = first_epoch(config.runtime_dir)
        session_manager = SessionManager(registry, timing, epoch, config.max_sessions, config.quarantine_quiet)
        step_handler = StepHandler(session_manager, most_bytes)
        attach_path, creates = _attach_path(config, endpoint.address), CreateHandler(session_manager)
        real_time = (clock or loop).time  # also passes while the service is held up
        groups = _groups_of_calls(config, session_manager, str(attach_path), watch_streams, real_time)
        groups += [step_handler, StepStreams(session_manager, step_handler), creates]
        lane_calls = LaneCalls(get_handlers(groups), creates, lambda: registry.max_tokens)
        attach = AttachServer(attach_path, StepLanes(session_manager, step_handler, lane_calls, largest_bytes), timing)
        if config.metrics_listen:
            metrics = await _open_metrics(config.metrics_listen, session_manager, guard)
        methods = register(groups, most_bytes, lambda: registry.max_tokens)
        await endpoint.start(methods, has_reflection=config.reflection)
        await registry.reserve()
        await endpoint.set_serving(True)
    except BaseException as error:
        if metrics is not None:
            await metrics.stop()
        if endpoint is not None:
            await endpoint.stop(grace=None)
        if attach is not None:
            await attach.close()
        if endpoint is not None:
            endpoint.release()
        for opened in (directory, disks, own_clock):
            if opened is not None:
                opened.close()
        if (refusal := _find_refusal(error, config)) is not None:
            raise refusal from None
        raise
    log.info("ready", address=endpoint.address, num_pools=config.num_pools, pool_memory=registry.sizes.pool_memory)
    kept = directory, disks
    return RunningServer(attach.path, session_manager, config.drain_timeout, guard, endpoint, attach, metrics, own_clock, *kept)


async def _open_metrics(listen: str, session_manager: SessionManager, guard: Guard) -> "MetricsServer":
    """Raises StartError."""
    from kvkeeper.common.service.metrics import MetricsServer  # with an HTTP server, for which no other start has to wait

    from .metrics import cache_metrics

    return await MetricsServer.open(listen, partial(cache_metrics, session_manager, guard))


def _open_memory_directory(config: CacheConfig) -> MemoryDirectory | None:
    """Raises MemoryRefused."""
    if config.memory_dir is None:
        return None
    kept_memory = make_kept_memory(config.device, config.hold, config.memory_dir)
    return MemoryDirectory(config.memory_dir, keep=config.keep, memory=kept_memory)


def _find_refusal(error: BaseException, config: CacheConfig) -> StartError | None:
    """What ended a start, by the flag that it is about; None for a bug, which ends it as it is."""
    flags: dict[type[Exception], str] = {
        MemoryRefused: f"--memory-dir {config.memory_dir}: ",
        DiskRefused: f"--disk-path {config.disk_path}: ",
        RemoteRefused: "",
        AddressInUse: f"--listen {config.listen}: ",
        OutOfMemory: "",
        CudaError: f"--device {config.device}: ",
    }
    return next((StartError(f"{flag}{error}") for kind, flag in flags.items() if isinstance(error, kind)), None)


def _make_remote(config: CacheConfig) -> RemoteMaker | None:
    """Raises RemoteRefused."""
    if not config.remote:
        return None
    assert config.remote_secret is not None, "checked by the config"
    return open_remote(
        config.remote,
        secret=config.remote_secret,
        ca=config.remote_ca,
        ttl=config.remote_ttl,
        timeout=config.remote_deadline,
        memory=config.remote_memory,
    )


def _groups_of_calls(
    config: CacheConfig,
    session_manager: SessionManager,
    attach_path: str,
    watch_streams: WatchStreams,
    time: Callable[[], float],
) -> list[object]:
    """The groups of calls beside the step."""
    one_item = OneItemSessions(session_manager)
    return [
        SessionCalls(config, session_manager, attach_path),
        SequenceCalls(session_manager, one_item),
        PrefixCalls(session_manager),
        EvictionCalls(session_manager, one_item),
        KvCalls(session_manager, one_item),
        InspectionCalls(session_manager, watch_streams, time),
    ]


def _attach_path(config: CacheConfig, address: str) -> Path:
    """One attach socket per address: the next service on the address removes the socket of one that died."""
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    return private_directory(config.runtime_dir) / f"attach-{name}.sock"
