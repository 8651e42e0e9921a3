"""keep_serving: opens a session, serves on it, and opens the next one when it is lost.

Requests outlive a session: they start again from the tokens they hold. When no session can be opened for a while they end with
CACHE_SERVICE_DOWN; until the first session is open, and between two sessions, new requests are refused with it. They do not
outlive the device: where it is lost to this process, or to that of another rank, they end with DEVICE_LOST, and serving ends.
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.common.service.threads import find_shortage

from ..cache_session.failures import has_ended_session, has_lost_rank, host_exhausted, is_away
from ..cache_session.kv_memory import KvMemory, open_memory
from ..cache_session.pool_limits import make_limits
from ..compute.device.device_errors import DeviceFault, find_fault, lost_by
from ..compute.served_model import SAVES_MEMORY, ServedModel
from ..config import EngineConfig
from ..ranks.ranks import MOST_LOSSES, Ranks
from ..scheduler.limits import Limits
from ..values.errors import BrokenInvariant, CacheServiceDown, DeviceLost, RequestFailed
from .engine import Engine

log = structlog.get_logger()

# Requests that were under way wait for the cache service to be back, so an attempt, which costs next to nothing, comes soon
# after it is.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 0.25
_LOG_PAUSE_S = 1.0


class CacheServiceRefused(Exception):
    """The cache service will never serve this model as it is configured. One line."""


class RanksGivenUp(Exception):
    """One rank or another is lost whenever a session is opened. One line."""


async def keep_serving(
    engine: Engine,
    client: AsyncCacheClient,
    model: ServedModel,
    config: EngineConfig,
    on_session: Callable[[bool], Awaitable[None]],
    address: str,
    ranks: Ranks | None = None,
) -> None:
    """Serve until the engine is stopped. on_session: called with whether there is a session; address: of this engine.

    ranks: the others, where several share the model. One that is lost ends the session, and all are started anew for the next;
    one that loses its device ends serving, as this one does.

    Raises CacheServiceRefused at the start; DeviceLost and RanksGivenUp, which are logged but at the start.
    """
    has_served = False
    log.info("starting", doing="opening a session")
    attempt = partial(open_memory, client, model, config, address, ranks)
    while (memory := await _open(engine, attempt, config, ranks, may_refuse=not has_served)) is not None:
        has_served, has_gone_away, is_lost = True, False, False
        try:
            limits = make_limits(memory.session.pool, model, config)
            _log_session(limits, model, "lane" if memory.session.has_step_lane else "grpc")
            await engine.run_session(memory, limits, partial(on_session, True))
            return
        except KvkeeperError as error:
            log.warning("session_lost", code=error.code.name, reason=error.reason)
            has_gone_away = is_away(error)
            # No rank survives these steps, or the cache service refuses them: the same requests would meet it again.
            if ranks is not None and engine.requests.have_got_on():
                ranks.forget_losses()
            if ranks is not None and has_lost_rank(error) and ranks.are_hopeless:
                engine.requests.fail_all(RequestFailed("all ranks fail again and again"))
            elif not has_ended_session(error):
                engine.requests.fail_all(RequestFailed("the cache service refused a step"))
        except Exception as error:
            if (lost := lost_by(error)) is not None:
                is_lost = True
                _end(engine, lost)
                raise lost from None
            # A bug in the loop: nothing moves these requests any more, and the operator has to end the service.
            log.exception("broken_invariant")
            engine.stop()
            engine.requests.fail_all(BrokenInvariant("the service found itself inconsistent; its log says more"))
            raise
        finally:
            await on_session(False)
            await memory.close(is_away=has_gone_away, is_lost=is_lost)


async def _open(
    engine: Engine,
    attempt: Callable[[], Awaitable[KvMemory]],
    config: EngineConfig,
    ranks: Ranks | None = None,
    *,
    may_refuse: bool,
) -> KvMemory | None:
    """A session, after however many attempts; None when the engine was stopped.

    Raises DeviceLost, CacheServiceRefused, RanksGivenUp.
    """
    num_losses = 0
    pause, give_up_at, log_at = _FIRST_PAUSE_S, time.monotonic() + config.reconnect_timeout, 0.0
    while not engine.is_stopping:
        try:
            return await attempt()
        except Exception as error:
            if (fault := _lasting_fault(error)) is not None:
                lost = DeviceLost(fault.text(SAVES_MEMORY))
                if not may_refuse:
                    _end(engine, lost)
                raise lost from None
            if ranks is not None and isinstance(error, KvkeeperError) and has_lost_rank(error) and ranks.have_parted:
                num_losses += 1
                if num_losses > MOST_LOSSES:
                    raise _give_up(engine, ranks.lost, logs=not may_refuse) from None
            if (short := find_shortage(error)) is not None and short.resource in ("threads", "descriptors"):
                error = host_exhausted(short.text)
            if not isinstance(error, KvkeeperError):
                raise
            if time.monotonic() >= log_at:
                log.warning("no_session", code=error.code.name, reason=error.reason, message=error.message)
                log_at = time.monotonic() + _LOG_PAUSE_S
            if may_refuse and not has_ended_session(error):
                raise CacheServiceRefused(f"the cache service refuses this engine: {error}") from None
        if time.monotonic() > give_up_at:
            engine.requests.fail_all(CacheServiceDown("the cache service does not answer"))
        await engine.wait_for_stop(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return None


def _lasting_fault(error: Exception) -> DeviceFault | None:
    """The fault of a device that failed an attempt, where the next one would meet it, too.

    Memory that could not be mapped may be that of a cache service that has ended: only a lost device lasts then.
    """
    fault = find_fault(error)
    return None if fault is None or (isinstance(error, KvkeeperError) and not fault.is_sticky) else fault


def _end(engine: Engine, lost: DeviceLost) -> None:
    """The device is lost: end all requests, because nothing can be computed for them any more."""
    log.error("device_lost", message=lost.fault)
    engine.stop()
    engine.requests.fail_all(lost)


def _give_up(engine: Engine, lost: str, *, logs: bool) -> RanksGivenUp:
    """No rank survives the opening of a session, and the next one would not: end all requests. logs: whether it says so."""
    given_up = RanksGivenUp(f"no session can be opened, because a rank is lost each time: {lost}")
    if logs:
        log.error("ranks_given_up", message=str(given_up))
        engine.stop()
    engine.requests.fail_all(RequestFailed("all ranks fail again and again"))
    return given_up


def _log_session(limits: Limits, model: ServedModel, step_carrier: str) -> None:
    """The pool, what carries the steps, and how long sequences get; a warning where the model could make them longer."""
    log.info(
        "session_opened",
        num_blocks=limits.num_usable_blocks + 1,  # and the null block
        block_size=limits.block_size,
        max_tokens_per_sequence=limits.max_len,
        step_carrier=step_carrier,
    )
    if limits.max_len < model.max_len:
        log.warning(
            "shorter_than_model",
            max_tokens_per_sequence=limits.max_len,
            model_positions=model.max_len,
            message=limits.bound,
        )
