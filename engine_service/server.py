"""Puts the engine service together and takes it apart again.

Owns the order: take the address, load the model, open a session, take over requests, report SERVING; and backwards: refuse new
requests, let running requests end, unmap and close the session, end streams, remove the socket. A start that fails raises a
StartError of one line, with everything undone.
"""

import asyncio
import contextlib
import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.credentials import Credentials
from kvkeeper.client.retry import CallOptions
from kvkeeper.common import tracing
from kvkeeper.common.service.endpoint import Endpoint
from kvkeeper.common.service.extras import missing
from kvkeeper.common.service.intake import Intake
from kvkeeper.common.service.listen import AddressInUse
from kvkeeper.common.service.methods import Contract, max_prompt_message_bytes
from kvkeeper.common.service.metrics import MetricsServer
from kvkeeper.common.service.process import ServiceLost, StartError
from kvkeeper.common.service.threads import in_thread, in_thread_or_here
from kvkeeper.common.trust.guard import Guard

from .compute.cpu_kernels import switch_kernels
from .compute.device.device_errors import fault_of
from .compute.served_model import SAVES_MEMORY, ServedModel, load_served_model, most_tokens, own_name
from .config import GATEWAY_PACKAGE, EngineConfig
from .loop.engine import Engine, make_engine
from .loop.session_loop import CacheServiceRefused, keep_serving
from .loop.time_limits import end_stalled
from .loop.tracing import EngineTracing
from .model.checkpoint.errors import ModelError, NoDeviceError
from .model.parallel.split import WHOLE
from .ranks.failures import RankLost
from .ranks.ranks import Ranks
from .rpc.admission import connection_of
from .rpc.fronts.fronts import Fronts
from .rpc.fronts.public_address import metrics_at, open_address, serve_at
from .rpc.hand_over.taker import TakeOverRefused
from .rpc.methods import intake_of
from .rpc.service import EngineService
from .scheduler.state.fair_share import FairShare
from .scheduler.state.policies import make_ordering
from .scheduler.state.waiting import WaitingSequences
from .speculation.draft_model import DraftModel
from .speculation.speculator import PromptLookUp, Proposer
from .text_workers.text_work import TextWork
from .text_workers.text_worker import Limits
from .values.errors import DeviceLost, Draining

log = structlog.get_logger()

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 10.0, 60.0  # for an answer of the cache service
_LAST_STEP_S = 5.0  # for the step that is computed when everything else has ended
_LAST_WORDS_S = 2.0  # for clients to hear that the device is lost


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
    ranks: Ranks | None = None  # beside this process, where several share the model
    _is_stopped: bool = False

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def has_ended_requests(self) -> bool:
        """The engine was stopped, and has nothing more to compute."""
        return self._serving.done()

    async def wait_ready(self) -> None:
        """Wait until requests are taken. Raises StartError and ServiceLost as wait_end does."""
        waiting = asyncio.create_task(self._ready.wait())
        await asyncio.wait((waiting, self._serving), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._serving.done():
            await self.wait_end()

    async def wait_end(self) -> None:
        """Wait until serving has ended. Raises StartError when the cache service refuses the model, the engine whose requests
        are to be taken over refuses this one, or the device cannot be used; ServiceLost when that is lost later."""
        try:
            await asyncio.shield(self._serving)
            if self._taking is not None and self._taking.done():
                self._taking.result()
        except CacheServiceRefused as error:
            raise StartError(f"--cache {self.config.cache}: {error}") from None
        except DeviceLost as error:
            if not self._ready.is_set():
                raise StartError(f"--device {self.config.device}: {error.fault}") from None
            await self._tell_lost()
            raise ServiceLost(error.fault) from None
        except TakeOverRefused as error:
            raise StartError(f"--take-over {self.config.take_over}: {error}") from None

    async def drain(self) -> None:
        """Take no more requests; let the live ones end and their clients read the end, but no longer than configured."""
        await self._endpoint.drain()
        self.engine.stop()
        await self.text_work.close()  # what is still text there would be refused when it comes out of there
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                await asyncio.wait((self._serving,))
                await self.service.wait_delivered()
        except TimeoutError:
            log.warning("drain_timeout", num_requests=len(self.engine.requests.generations))

    async def _tell_lost(self) -> None:
        """Let clients read that their requests have ended, and health that this engine serves no more."""
        await self._endpoint.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.service.streams.wait_none()

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
        if self.ranks is not None:
            stopping = in_thread_or_here(self.ranks.stop)  # a step that waits for them ends with them
            await asyncio.gather(self._serving, stopping, return_exceptions=True)
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
    if config.threads is None and config.tensor_parallel > 1:
        config = dataclasses.replace(config, threads=max(torch.get_num_threads() // config.tensor_parallel, 1))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    ranks: Ranks | None = None
    endpoint: Endpoint | Fronts | None = None
    metrics: MetricsServer | None = None
    credentials = credentials_of(config)
    try:
        # Before the long load, so that a taken address is refused at once.
        message_bytes = max_prompt_message_bytes(most_tokens(config) if model is None else model.max_len)
        guard, intake = Guard(config), intake_of(config, message_bytes)
        opened = endpoint = await open_address(config, guard, intake, message_bytes)
        if config.health_address:
            endpoint.open_health(config.health_address)
        await in_thread(switch_kernels, config)
        name = config.model_name or own_name(Path(config.model))
        log.info("starting", doing="loading the model", model=name, device=config.device)
        if model is None and config.tensor_parallel > 1:
            ranks = Ranks(config)
            await in_thread(ranks.start)  # they load their parts beside this one
        split = WHOLE if ranks is None else ranks.split
        served = model if model is not None else await in_thread(load_served_model, config, split)
        served = dataclasses.replace(served, served_as=config.model_name)
        if ranks is not None:
            await in_thread(ranks.make_ready)
        proposer = await in_thread(_load_proposer, config, served)
        shares = FairShare() if config.fair_share else FairShare(connection_of) if config.client_shares else None
        waiting = WaitingSequences(make_ordering(config.policy), shares)
        engine_tracing = EngineTracing(tracing.tracer(), served.name)
        engine = make_engine(config.max_waiting, proposer, engine_tracing, waiting, runs_ahead=config.overlap)
        share = config.intake_percent / 100
        engine.on_turn = lambda is_computing: intake.turns.open_window(share if is_computing else 1.0)
        limits = Limits(config.text_seconds, config.text_memory)
        text_work = await in_thread(
            TextWork, served.text, served.vocab_size, config.text_workers, limits, config.input_limits, config.max_waiting
        )

        async def leave() -> None:
            engine.stop()
            await opened.drain()

        service = EngineService(config, served, engine, text_work, intake.turns, leave, credentials, message_bytes)
        if config.metrics_listen:
            metrics = await MetricsServer.open(config.metrics_listen, partial(metrics_at, opened, service, guard))
        gateway = _gateway(config, service, engine, served)
        await serve_at(endpoint, config, service, intake.turns, guard, gateway)
    except BaseException as error:
        if ranks is not None:
            ranks.stop()
        if metrics is not None:
            await metrics.stop()
        if endpoint is not None:
            await endpoint.stop(grace=None)
            endpoint.release()
        if isinstance(error, RankLost):
            raise StartError(f"--tensor-parallel {config.tensor_parallel}: {error}") from None
        if (fault := fault_of(error)) is not None:
            raise StartError(f"--device {config.device}: {fault.text(SAVES_MEMORY)}") from None
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
            log.info("ready", address=endpoint.address, model=served.name)
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
    if ranks is not None:
        loop = asyncio.get_running_loop()
        ranks.on_lost = lambda: _wake_from_a_thread(loop, engine)
    serving = asyncio.create_task(keep_serving(engine, client, served, config, on_session, endpoint.address, ranks))
    stalls = asyncio.create_task(end_stalled(engine, config.stall_timeout)) if config.stall_timeout else None
    taking = asyncio.create_task(take_over()) if config.take_over else None
    return RunningServer(
        engine, config, service, text_work, intake, guard, serving, ready, endpoint, client, metrics, stalls, taking, ranks
    )


def _wake_from_a_thread(loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(engine.wake)


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
    """The proposer of guesses, as configured, ready for its first one; None: none. Raises ModelError, StartError."""
    if config.speculation == "prompt-look-up":
        return PromptLookUp()
    if config.speculation == "off":
        return None
    try:
        # Whole, on the first rank, and with all layers in a block: its batches have one table for all of them. Plainly: graphs
        # of a second model would take memory beside the pool.
        own = dataclasses.replace(config, model=config.draft_model, kv_dtype="auto", groups=False, graphs=False)
        draft = load_served_model(own)
    except ModelError as error:
        raise StartError(f"--draft-model {config.draft_model}: {error}") from None
    if draft.vocab_size != served.vocab_size:
        raise StartError(f"--draft-model: its vocabulary has {draft.vocab_size} tokens, that of --model {served.vocab_size}")
    proposer = DraftModel(draft, min(served.max_len, draft.max_len))
    proposer.make_ready()
    return proposer
