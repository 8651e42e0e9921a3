"""Two services side by side, one of which foretells steps: the same calls must be answered with the same bytes.

Each is a StepHandler over a SessionManager and one pool, without sockets and with a clock that is set by hand.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.sequences.claims import StartNumbers
from kvkeeper.cache_service.core.values.errors import CacheError
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Executor
from kvkeeper.cache_service.core.values.views import PoolStats
from kvkeeper.cache_service.rpc.step_handler import StepHandler
from kvkeeper.cache_service.runtime.live_session import LiveSession
from kvkeeper.cache_service.runtime.pool import Pool
from kvkeeper.cache_service.runtime.session_manager import SessionManager
from kvkeeper.client.steps import StepItems, encode
from kvkeeper.common.service.methods import MAX_MESSAGE_BYTES

Outcome = tuple[bytes, PoolStats | None] | tuple[type[CacheError], str]
_SPEC = KvSpec(b"", "m", 1, 1, 8, 2, 2)


class _Clock:
    """A clock whose timers never fire."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        return SimpleNamespace(cancel=lambda: None)


class Side:
    """One of the two services."""

    def __init__(self, config: PoolConfig, *, foretells: bool) -> None:
        self.clock = _Clock()
        # Memory of which nothing is ever read or copied: all sessions run their copies themselves.
        arena: Any = SimpleNamespace(fields=lambda: {"kind": "none"}, blocks=lambda *sizes: None)
        self.pool = Pool(_SPEC, config, PoolManager(config, StartNumbers()), arena, arena if config.num_host_blocks else None)
        registry: Any = SimpleNamespace(pools=[self.pool], obtain=self._obtain, stored=lambda spec: spec)
        self.sessions = SessionManager(registry, self.clock, epoch=1, max_sessions=100)
        self.handler = StepHandler(self.sessions, MAX_MESSAGE_BYTES, foretells=foretells)

    async def _obtain(self, spec: KvSpec, **_: bool) -> Pool:
        return self.pool

    async def open(self) -> LiveSession:
        return await self.sessions.open(_SPEC, Executor.ENGINE, 1e9, "pair")

    def step(self, live: LiveSession, items: StepItems, step_id: int, completed: int, *, is_seen: bool = False) -> Outcome:
        """The reply, or the error. is_seen: with what GetStats tells before the work after the answer is done."""
        raw = encode(items, live.core.id, live.core.epoch, step_id, completed)
        try:
            _, reply = self.handler.apply(raw, live)
        except CacheError as error:
            return type(error), str(error)
        assert isinstance(reply, bytes), "engines run their own copies"
        seen = self.pool.stats() if is_seen else None
        self.handler.after_answer(live)
        return reply, seen
