"""The common part of the one-item calls: the session of a call, its mode, and its copies.

A one-item call counts as a step whose device work is complete at once. Its copies run here before the answer, so one-item
calls belong to sessions whose copies the cache service executes.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.values.copies import Copies
from ..core.values.errors import WrongMode
from ..core.values.types import Executor
from ..runtime.lease import SessionMode
from ..runtime.live_session import LiveSession
from ..runtime.pool import Pool
from ..runtime.session_manager import SessionManager
from .ownership import SessionRequest, own_session, readable_session


class OneItemSessions:
    """Hands out the sessions of one-item calls."""

    def __init__(self, session_manager: SessionManager) -> None:
        self._session_manager = session_manager

    @contextmanager
    def session(self, request: SessionRequest) -> Iterator[LiveSession]:
        """The session that the call changes. The first such call that succeeds fixes the session's mode. Raises WrongMode."""
        live = own_session(self._session_manager, request)
        if live.core.executor is Executor.ENGINE:
            raise WrongMode("an engine that executes its own copies changes sequences by steps only", mode="steps")
        mode = live.core.mode
        live.core.use_mode(SessionMode.ONE_ITEM)
        try:
            yield live
        except Exception:
            live.core.mode = mode
            raise
        live.pool.publish_soon()

    async def wait_for_copies(self, request: SessionRequest) -> None:
        """Waits until no large copy runs in the session's pool; see Pool.copy."""
        while (copying := readable_session(self._session_manager, request).pool.copying) is not None:
            await asyncio.shield(copying)


async def run_copies(pool: Pool, copies: Copies) -> None:
    """Runs the copies of a call to their end."""
    copying = pool.copy(copies)
    if copying is not None:
        await copying
