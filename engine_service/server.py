"""Puts the engine service together and takes it apart again.

Owns the order: take the address, load the model, open a session, take over requests, report SERVING; and backwards: refuse new
requests, let running requests end, unmap and close the session, end streams, remove the socket. A start that fails raises a
StartError of one line, with everything undone.
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from prometheus_client import Metric

from kvkeeper import tracing
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.credentials import Credentials
from kvkeeper.client.retry import CallOptions
from kvkeeper.service.endpoint import Admission, Endpoint
from kvkeeper.service.extras import missing
from kvkeeper.service.intake import Intake
from kvkeeper.service.listen import AddressInUse
from kvkeeper.service.methods import Contract, MethodRouter
from kvkeeper.service.metrics import MetricsServer
from kvkeeper.service.process import StartError
from kvkeeper.trust.guard import Guard

from .compute.cpu_kernels import switch_kernels
from .compute.served_model import ServedModel, load_served_model
from .config import GATEWAY_PACKAGE, EngineConfig
from .loop.engine import Engine, make_engine
from .loop.session_loop import CacheServiceRefused, keep_serving
from .loop.time_limits import end_stalled
from .loop.tracing import EngineTracing
from .model.checkpoint.errors import ModelError, NoDeviceError
from .rpc.admission import connection_of
from .rpc.fronts.fronts import Fronts, open_fronts
from .rpc.fronts.set_up import front_services, front_set_up
from .rpc.hand_over.taker import TakeOverRefused
from .rpc.methods import intake_of, router_of
from .rpc.metrics import PREFIX as METRICS_PREFIX
from .rpc.service import EngineService
from .scheduler.state.fair_share import FairShare
from .scheduler.state.policies import make_ordering
from .scheduler.state.waiting import WaitingSequences
from .speculation.draft_model import DraftModel
from .speculation.speculator import PromptLookUp, Proposer
from .text_workers.text_work import TextWork
from .text_workers.text_worker import Limits
from .values.errors import Draining

log = structlog.get_logger()

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 10.0, 60.0  # for an answer of the cache service
_LAST_STEP_S = 5.0  # for the step that is computed when everything else has ended


@dataclass(slots=True, eq=False)
class RunningServer:
    """An engine service that listens. address is what a client's channel takes."""

    engine: Engine
    config: EngineConfig
    service: EngineService
    text_work: TextWork
    intake: Intake
    guard: Guard
    _serving: asyncio.Task[None]
    _ready: asyncio.Event
    _endpoint: Endpoint | Fronts
    _client: AsyncCacheClient
    metrics: MetricsServer | None = None
    _stalls: asyncio.Task[None] | None = None
    _taking: asyncio.Task[None] | None = None  # over, from another engine
    _is_stopped: bool = False

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def has_ended_requests(self) -> bool:
        """The engine was stopped, and has nothing more to compute."""
        return self._serving.done()

    async def wait_ready(self) -> None:
        """Wait until requests are taken. Raises StartError as wait_end does."""
        waiting = asyncio.create_task(self._ready.wait())
        await asyncio.wait((waiting, self._serving), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._serving.done():
            await self.wait_end()

    async def wait_end(self) -> None:
        """Wait until serving has ended. Raises StartError when the cache service refuses the model, or the engine whose
        requests are to be taken over refuses this one."""
        try:
            await asyncio.shield(self._serving)
            if self._taking is not None and self._taking.done():
                self._taking.result()
        except CacheServiceRefused as error:
            raise StartError(f"--cache {self.config.cache}: {error}") from None
        except TakeOverRefused as error:
            raise StartError(f"--take-over {self.config.take_over}: {error}") from None

    async def drain(self) -> None:
        """Take no more requests; let the live ones end and their clients read the end, but no longer than configured."""
        await self._endpoint.drain()
        self.engine.stop()
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                await asyncio.wait((self._serving,))
                await self.service.wait_delivered()
        except TimeoutError:
            log.warning("drain_timeout", num_requests=len(self.engine.requests.generations))

    async def stop(self) -> None:
        """End what still runs, close the session and remove the socket. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.engine.stop()
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)
        self.engine.requests.fail_all(Draining("the service is stopping"))
        await asyncio.wait((self._serving,), timeout=_LAST_STEP_S)
        if self.metrics is not None:
            await self.metrics.stop()
        if self._stalls is not None:
            self._stalls.cancel()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self._endpoint.stop()
        await self.service.close()
        await self._client.close()
        await self.text_work.close()
        self.engine.close()
        self._endpoint.release()
        log.info("stopped")


async def start_server(config: EngineConfig, *, model: ServedModel | None = None) -> RunningServer:
    """A service that listens and looks for its session. model is for tests. Raises StartError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    endpoint: Endpoint | Fronts | None = None
    metrics: MetricsServer | None = None
    credentials = credentials_of(config)
    try:
        # Before the long load, so that a taken address is refused at once.
        guard, intake = Guard(config), intake_of(config)
        opened = endpoint = await _open(config, guard, intake)
        if config.health_address:
            endpoint.open_health(config.health_address)
        await asyncio.to_thread(switch_kernels, config)
        log.info("starting", doing="loading the model", model=Path(config.model).name, device=config.device)
        served = model if model is not None else await asyncio.to_thread(load_served_model, config)
        proposer = await asyncio.to_thread(_load_proposer, config, served)
        shares = FairShare() if config.fair_share else FairShare(connection_of) if config.client_shares else None
        waiting = WaitingSequences(make_ordering(config.policy), shares)
        engine = make_engine(config.max_waiting, proposer, EngineTracing(tracing.tracer(), served.model_id), waiting)
        share = config.intake_percent / 100
        engine.on_turn = lambda is_computing: intake.turns.open_window(share if is_computing else 1.0)
        limits = Limits(config.text_seconds, config.text_memory)
        text_work = await asyncio.to_thread(
            TextWork, served.text, served.vocab_size, config.text_workers, limits, config.input_limits, config.max_waiting
        )

        async def leave() -> None:
            engine.stop()
            await opened.drain()

        service = EngineService(config, served, engine, text_work, intake.turns, leave, credentials)
        if config.metrics_listen:
            metrics = MetricsServer(config.metrics_listen, partial(_metrics, service, guard, opened, served.model_id))
        gateway = _gateway(config, service, engine, served)
        if isinstance(endpoint, Fronts):
            await endpoint.start(
                front_services(service, intake.turns, guard, gateway),
                front_set_up(config, endpoint, served, gateway),
                lambda: service.max_len,
            )
        else:
            routers = [router_of(service), *(MethodRouter(*each) for each in gateway)]
            await endpoint.start(*routers, has_reflection=config.reflection)
    except BaseException as error:
        if metrics is not None:
            await metrics.stop()
        if endpoint is not None:
            await endpoint.stop(grace=None)
            endpoint.release()
        if isinstance(error, ModelError):
            raise StartError(f"--model {config.model}: {error}") from None
        if isinstance(error, NoDeviceError):
            raise StartError(f"--device {config.device}: {error}") from None
        if isinstance(error, AddressInUse):
            raise StartError(f"--listen {config.listen}: {error}") from None
        raise
    has_session, has_taken_over, ready = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def on_session(is_there: bool) -> None:
        has_session.set() if is_there else has_session.clear()
        await endpoint.set_serving(is_there and has_taken_over.is_set())
        if is_there and has_taken_over.is_set():
            log.info("ready", address=endpoint.address, model=served.model_id)
            ready.set()

    async def take_over() -> None:
        await has_session.wait()
        try:
            await service.take_over(config.take_over, endpoint.address)
        except TakeOverRefused:
            engine.stop()
            raise
        has_taken_over.set()
        if has_session.is_set():
            await on_session(True)

    if not config.take_over:
        has_taken_over.set()

    client = AsyncCacheClient(config.cache, call_options(config), credentials)
    serving = asyncio.create_task(keep_serving(engine, client, served, config, on_session, endpoint.address))
    stalls = asyncio.create_task(end_stalled(engine, config.stall_timeout)) if config.stall_timeout else None
    taking = asyncio.create_task(take_over()) if config.take_over else None
    return RunningServer(
        engine, config, service, text_work, intake, guard, serving, ready, endpoint, client, metrics, stalls, taking
    )


async def _open(config: EngineConfig, guard: Guard, intake: Intake) -> Endpoint | Fronts:
    """Takes the address, for this process or for its fronts. Raises StartError, AddressInUse."""
    if config.fronts:
        return await open_fronts(config.listen, config.fronts)
    admission = Admission(config.connections, config.connection_calls, (intake,))
    return await Endpoint.open(config.listen, admission=admission, guard=guard)


def _metrics(service: EngineService, guard: Guard, endpoint: Endpoint | Fronts, model: str) -> Iterator[Metric]:
    """Of a scrape."""
    yield from service.metrics()
    if isinstance(endpoint, Fronts):
        yield from endpoint.metrics(METRICS_PREFIX, model)
    refused = endpoint.refused if isinstance(endpoint, Fronts) else Counter[str]()
    yield from guard.metrics(METRICS_PREFIX, refused, model=model)


def _gateway(config: EngineConfig, service: EngineService, engine: Engine, served: ServedModel) -> list[tuple[Contract, Any]]:
    """The gateway's protocol, where it is wanted and its package is installed: its contract, and what answers."""
    if config.gateway == "off" or missing(GATEWAY_PACKAGE):
        return []
    from .rpc.gateway.calls import VllmEngine
    from .rpc.gateway.methods import CONTRACT as GATEWAY_CONTRACT

    return [(GATEWAY_CONTRACT, VllmEngine(config, service, engine, has_tokenizer=served.text.tokenizer is not None))]


def credentials_of(config: EngineConfig) -> Credentials:
    """That this engine shows the cache service and other engines."""
    return Credentials(
        token_file=config.cache_token_file,
        tls_ca=config.cache_tls_ca,
        tls_cert=config.cache_tls_cert,
        tls_key=config.cache_tls_key,
    )


def call_options(config: EngineConfig) -> CallOptions:
    """Of calls to the cache service, which is worth a wait: after a stall it goes on with everything in place."""
    return CallOptions(timeout_s=min(max(config.reconnect_timeout, _SHORTEST_WAIT_S), _LONGEST_WAIT_S))


def _load_proposer(config: EngineConfig, served: ServedModel) -> Proposer | None:
    """The proposer of guesses, as configured; None: none. Raises ModelError, StartError."""
    if config.speculation == "prompt-look-up":
        return PromptLookUp()
    if config.speculation == "off":
        return None
    try:
        draft = load_served_model(dataclasses.replace(config, model=config.draft_model))
    except ModelError as error:
        raise StartError(f"--draft-model {config.draft_model}: {error}") from None
    if draft.vocab_size != served.vocab_size:
        raise StartError(f"--draft-model: its vocabulary has {draft.vocab_size} tokens, that of --model {served.vocab_size}")
    return DraftModel(draft, min(served.max_len, draft.max_len))
