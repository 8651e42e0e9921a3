"""Puts the engine service together and takes it apart again.

Owns the order: take the address, load the model, open a session, take over requests, report SERVING; and backwards: refuse new
requests, let running requests end, unmap and close the session, end streams, remove the socket. A start that fails raises a
StartError of one line, with everything undone.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
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
from kvkeeper.common.service.extras import missing
from kvkeeper.common.service.listen import AddressInUse
from kvkeeper.common.service.methods import Contract, max_prompt_message_bytes
from kvkeeper.common.service.metrics import MetricsServer
from kvkeeper.common.service.process import ServiceLost, StartError
from kvkeeper.common.service.threads import in_thread, in_thread_or_here
from kvkeeper.common.service.turns import Turns
from kvkeeper.common.trust.guard import Guard

from .compute.cpu_kernels import switch_kernels
from .compute.device.device_errors import find_fault
from .compute.served_model import SAVES_MEMORY, ServedModel, load_served_model, most_tokens, own_name
from .config import GATEWAY_PACKAGE, EngineConfig
from .loop.engine import Engine, make_engine
from .loop.session_loop import CacheServiceRefused, RanksGivenUp, keep_serving
from .loop.time_limits import end_stalled
from .loop.tracing import EngineTracing
from .model.checkpoint.errors import ModelError, NoDeviceError
from .model.split import WHOLE
from .movement.take_over import TakeOverRefused
from .ranks.messages import RankLost
from .ranks.ranks import Ranks
from .rpc.admission import get_connection
from .rpc.methods import turn_limits
from .rpc.service import EngineService
from .scheduler.policies import make_ordering
from .scheduler.waiting import FairShare, WaitingSequences
from .serving.fronts import Fronts, metrics_at, open_fronts, serve_at
from .speculation.draft_model import DraftModel
from .speculation.speculator import PromptLookUp, Proposer
from .text_workers.text_work import TextWork
from .text_workers.text_worker import Limits
from .values.errors import DeviceLost, Draining

log = structlog.get_logger()

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 10.0, 60.0  # for an answer of the cache service
_LONGEST_PAUSE_S = 0.05  # between two tries of a call while it is away
_LAST_STEP_S = 5.0  # for the step that is computed when everything else has ended
_LAST_WORDS_S = 2.0  # for clients to hear that the device is lost


@dataclass(slots=True, eq=False)
class RunningServer:
    """An engine service that listens. address is what a client's channel takes."""

    engine: Engine
    config: EngineConfig
    service: EngineService
    text_work: TextWork
    turns: Turns  # of calls, whichever front they come by
    guard: Guard
    _serving: asyncio.Task[None]
    _ready: asyncio.Event
    _fronts: Fronts
    _client: AsyncCacheClient
    metrics: MetricsServer | None = None
    _stalls: asyncio.Task[None] | None = None
    _taking: asyncio.Task[None] | None = None  # over, from another engine
    ranks: Ranks | None = None  # beside this process, where several share the model
    _is_stopped: bool = False

    @property
    def address(self) -> str:
        return self._fronts.address

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
        are to be taken over refuses this one, or a device or rank cannot be used; ServiceLost when that is lost later."""
        try:
            await asyncio.shield(self._serving)
            if self._taking is not None and self._taking.done():
                self._taking.result()
        except CacheServiceRefused as error:
            raise StartError(f"--cache {self.config.cache}: {error}") from None
        except DeviceLost as error:
            if not self._ready.is_set():
                raise StartError(f"--device {self.config.device}: {error.fault}") from None
            await self._report_lost()
            raise ServiceLost(error.fault) from None
        except RanksGivenUp as error:
            if not self._ready.is_set():
                raise StartError(f"--tensor-parallel {self.config.tensor_parallel}: {error}") from None
            await self._report_lost()
            raise ServiceLost(str(error)) from None
        except TakeOverRefused as error:
            raise StartError(f"--take-over {self.config.take_over}: {error}") from None

    async def drain(self) -> None:
        """Take no more requests; let the live ones end and their clients read the end, but no longer than configured."""
        await self._fronts.drain()
        self.engine.stop()
        await self.text_work.close()  # what is still text there would be refused when it comes out of there
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                await asyncio.wait((self._serving,))
                await self.service.wait_delivered()
        except TimeoutError:
            log.warning("drain_timeout", num_requests=len(self.engine.requests.generations))

    async def _report_lost(self) -> None:
        """Let clients read that their requests have ended, and health that this engine serves no more."""
        await self._fronts.drain()
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
        await self._fronts.stop()
        await self.service.close()
        await self._client.close()
        await self.text_work.close()
        self.engine.close()
        self._fronts.release()
        log.info("stopped")


async def start_server(config: EngineConfig, *, model: ServedModel | None = None) -> RunningServer:
    """A service that listens and looks for its session. model is for tests. Raises StartError."""
    if config.threads is None and config.tensor_parallel > 1:
        config = dataclasses.replace(config, threads=max(torch.get_num_threads() // config.tensor_parallel, 1))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with _start_errors(config):
        async with contextlib.AsyncExitStack() as undo:
            server = await _start(config, model, undo)
            undo.pop_all()
    return server


async def _start(config: EngineConfig, model: ServedModel | None, undo: contextlib.AsyncExitStack) -> RunningServer:
    """undo: gets what takes apart again what was started."""
    credentials = make_credentials(config)
    # Before the long load, so that a taken address is refused at once.
    message_bytes = max_prompt_message_bytes(most_tokens(config) if model is None else model.max_len)
    guard, turns = Guard(config), Turns(turn_limits(config, message_bytes))
    fronts = await open_fronts(config.listen, config.fronts, config.log_level)
    undo.callback(fronts.release)
    undo.push_async_callback(fronts.stop, grace=None)
    if config.health_address:
        fronts.open_health(config.health_address)
    served, ranks = await _load(config, model, undo)
    engine = _make_engine(config, served, await in_thread(_load_proposer, config, served), turns)
    limits = Limits(config.text_seconds, config.text_memory)
    text_work = await in_thread(
        TextWork, served.text, served.vocab_size, config.text_workers, limits, config.input_limits, config.max_waiting
    )

    async def leave() -> None:
        engine.stop()
        await fronts.drain()

    service = EngineService(config, served, engine, text_work, leave, credentials, message_bytes)
    metrics: MetricsServer | None = None
    if config.metrics_listen:
        metrics = await MetricsServer.open(config.metrics_listen, partial(metrics_at, fronts, service, guard))
        undo.push_async_callback(metrics.stop)
    await serve_at(fronts, config, service, turns, guard, _gateway(config, service, engine, served))
    client = AsyncCacheClient(config.cache, call_options(config), credentials)
    if ranks is not None:
        ranks.on_lost = partial(_wake_from_a_thread, asyncio.get_running_loop(), engine)
    readiness = _Readiness(fronts, served.name)
    serving = asyncio.create_task(keep_serving(engine, client, served, config, readiness.on_session, fronts.address, ranks))
    stalls = asyncio.create_task(end_stalled(engine, config.stall_timeout)) if config.stall_timeout else None
    taking: asyncio.Task[None] | None = None
    if config.take_over:
        taking = asyncio.create_task(readiness.take_over(config.take_over, service, engine))
    else:
        readiness.has_taken_over.set()
    ready = readiness.is_ready
    return RunningServer(
        engine, config, service, text_work, turns, guard, serving, ready, fronts, client, metrics, stalls, taking, ranks
    )


async def _load(
    config: EngineConfig, model: ServedModel | None, undo: contextlib.AsyncExitStack
) -> tuple[ServedModel, Ranks | None]:
    """The model, on all ranks that share it; None: on this one alone. model: one that is loaded."""
    await in_thread(switch_kernels, config)
    name = config.model_name or own_name(Path(config.model))
    log.info("starting", doing="loading the model", model=name, device=config.device)
    ranks: Ranks | None = None
    if model is None and config.tensor_parallel > 1:
        ranks = Ranks(config)
        undo.callback(ranks.stop)
        await in_thread(ranks.start)  # they load their parts beside this one
    split = WHOLE if ranks is None else ranks.split
    served = model if model is not None else await in_thread(load_served_model, config, split)
    if ranks is not None:
        await in_thread(ranks.make_ready)
    return dataclasses.replace(served, served_as=config.model_name), ranks


def _make_engine(config: EngineConfig, served: ServedModel, proposer: Proposer | None, turns: Turns) -> Engine:
    shares = FairShare() if config.fair_share else FairShare(get_connection) if config.client_shares else None
    waiting = WaitingSequences(make_ordering(config.policy), shares)
    engine_tracing = EngineTracing(tracing.tracer(), served.name)
    engine = make_engine(config.max_waiting, proposer, engine_tracing, waiting, runs_ahead=config.overlap)
    share = config.intake_percent / 100
    engine.on_turn = lambda is_computing: turns.open_window(share if is_computing else 1.0)
    return engine


@contextlib.contextmanager
def _start_errors(config: EngineConfig) -> Iterator[None]:
    """What ends a start as a StartError, which names the flag."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, RankLost):
            raise StartError(f"--tensor-parallel {config.tensor_parallel}: {error}") from None
        if (fault := find_fault(error)) is not None:
            raise StartError(f"--device {config.device}: {fault.text(SAVES_MEMORY)}") from None
        if isinstance(error, ModelError):
            raise StartError(f"--model {config.model}: {error}") from None
        if isinstance(error, NoDeviceError):
            raise StartError(f"--device {config.device}: {error}") from None
        if isinstance(error, AddressInUse):
            raise StartError(f"--listen {config.listen}: {error}") from None
        raise


class _Readiness:
    """Whether requests are taken: there is a session, and what another engine had is taken over."""

    def __init__(self, fronts: Fronts, model_name: str) -> None:
        self._fronts, self._model_name = fronts, model_name
        self._has_session, self.has_taken_over, self.is_ready = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def on_session(self, is_there: bool) -> None:
        self._has_session.set() if is_there else self._has_session.clear()
        takes_requests = is_there and self.has_taken_over.is_set()
        await self._fronts.set_serving(takes_requests)
        if takes_requests:
            log.info("ready", address=self._fronts.address, model=self._model_name)
            self.is_ready.set()

    async def take_over(self, target: str, service: EngineService, engine: Engine) -> None:
        """Take the place of the engine at target. Raises TakeOverRefused."""
        await self._has_session.wait()
        try:
            await service.take_over(target, self._fronts.address)
        except TakeOverRefused:
            engine.stop()
            raise
        self.has_taken_over.set()
        if self._has_session.is_set():
            await self.on_session(True)


def _wake_from_a_thread(loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(engine.wake)


def _gateway(config: EngineConfig, service: EngineService, engine: Engine, served: ServedModel) -> list[tuple[Contract, Any]]:
    """The gateway's protocol, where it is wanted and its package is installed: its contract, and what serves its calls."""
    if config.gateway == "off" or missing(GATEWAY_PACKAGE):
        return []
    from .rpc.gateway.calls import VllmEngine
    from .rpc.gateway.methods import CONTRACT as GATEWAY_CONTRACT

    return [(GATEWAY_CONTRACT, VllmEngine(config, service, engine, has_tokenizer=served.text.tokenizer is not None))]


def make_credentials(config: EngineConfig) -> Credentials:
    """That this engine shows the cache service and other engines."""
    return Credentials(
        token_file=config.cache_token_file,
        tls_ca=config.cache_tls_ca,
        tls_cert=config.cache_tls_cert,
        tls_key=config.cache_tls_key,
    )


def call_options(config: EngineConfig) -> CallOptions:
    """The options of calls to the cache service, which is worth a wait: after a stall it continues with everything in place.

    All streams wait for one that is started again, so it is asked again soon after it is there.
    """
    seconds = min(max(config.reconnect_timeout, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
    return CallOptions(timeout_s=seconds, longest_pause_s=_LONGEST_PAUSE_S)


def _load_proposer(config: EngineConfig, served: ServedModel) -> Proposer | None:
    """The proposer of guesses, as configured, ready for its first one; None: none. Raises ModelError, StartError."""
    if config.speculation == "prompt-look-up":
        return PromptLookUp()
    if config.speculation == "off":
        return None
    try:
        # Whole, on the first rank. Plainly: graphs of a second model would take memory beside the pool.
        own = dataclasses.replace(config, model=config.draft_model, kv_dtype="auto", groups=True, graphs=False)
        draft = load_served_model(own)
    except ModelError as error:
        raise StartError(f"--draft-model {config.draft_model}: {error}") from None
    if draft.vocab_size != served.vocab_size:
        raise StartError(f"--draft-model: its vocabulary has {draft.vocab_size} tokens, that of --model {served.vocab_size}")
    proposer = DraftModel(draft, min(served.max_len, draft.max_len))
    proposer.make_ready()
    return proposer
