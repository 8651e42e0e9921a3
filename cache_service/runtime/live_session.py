"""LiveSession: a session with its pool, its attached processes and its streams; and what those streams are to it."""

import asyncio
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from ..core.values.errors import CacheError
from .lease import Session
from .pool import Pool


class CarrierKind(IntEnum):
    """How the steps of a session come. The numbers are the protocol's."""

    GRPC = 1
    LANE = 2


class Stream(Protocol):
    """A call that sends messages to a session unasked: WatchEvents."""

    def end_with(self, error: CacheError) -> None:
        """Ends it from outside; its client gets this error."""


class StepCarrier(Protocol):
    """A stream that steps come on."""

    @property
    def kind(self) -> CarrierKind: ...

    def end_with(self, error: CacheError) -> None:
        """Ends it from outside; its client gets this error."""


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session with its pool, its attached processes, one for each rank, and its streams."""

    core: Session
    pool: Pool
    attach_token: str
    tenant: str  # of the caller that opened it, or ANY_TENANT
    read_only_memory: bool  # its process may only read what it maps
    stream: StepCarrier | None = None  # that carried the last step
    lane: StepCarrier | None = None  # the step lane that was handed to its process, until it ends; with or without steps on it
    attached: set[int] = field(default_factory=set)  # ranks that have shown the token
    mapped: set[int] = field(default_factory=set)  # ranks whose process maps its arena, perhaps longer than the session lives
    quiet_at: float = 0.0  # from when on nothing of its processes is running on a device any more
    over: asyncio.Event = field(default_factory=asyncio.Event)
    watches: set[Stream] = field(default_factory=set)  # calls of WatchEvents; they end with the session

    def may_write(self, now: float) -> bool:
        """Whether a process of it can write to an arena, or a device still does so for one."""
        return (bool(self.mapped) or now < self.quiet_at) and not self.read_only_memory

    def end_carriers(self, error: CacheError) -> None:
        """Ends the streams and lanes of its steps."""
        for carrier in {self.stream, self.lane} - {None}:
            assert carrier is not None
            carrier.end_with(error)
        self.stream = self.lane = None

    def end_watches(self, error: CacheError) -> None:
        for watch in list(self.watches):
            watch.end_with(error)
