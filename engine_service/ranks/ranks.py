"""Ranks: the other ranks of this engine as its session sees them: made ready, put on a session's memory, and taken off it.

Owns that there is a team when a session is opened, and how often teams may be lost in a row. Lost ranks are an end of the
session and not of the requests: they go on in the next one from the tokens that they hold. But ranks that are lost again and
again while no request gets on are a fault that the same requests would meet again. A rank that has lost its device is the end
of the engine: no team is started after it.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import structlog
import torch

from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.kernels.quantised.host_blocks import HostBlocks

from ..compute.device.device_errors import DeviceFault, ReportedFault
from ..config import EngineConfig
from ..model.split import Split
from .mapped_arena import packing_fields
from .meeting import Meeting
from .messages import Kind, RankLost, RankRefused
from .team import Team

log = structlog.get_logger()

_SHARED_SETTINGS = (
    "model",
    "dtype",
    "kv_dtype",
    "kv_tail_tokens",
    "cpu_kernels",
    "threads",
    "log_level",
)  # of the engine's config
MOST_LOSSES = 3  # in a row


@dataclasses.dataclass(frozen=True, slots=True)
class Attachment:
    """A session's memory, for the other ranks."""

    path: str
    token: str
    arena_bytes: int
    host_arena_bytes: int
    block_bytes: int
    block_size: int
    has_groups: bool
    host_block_bytes: int  # of this rank
    packing: dict[str, Any] | None  # see mapped_arena.packing_fields


class Ranks:
    """All ranks but the first. Its methods block; one thread at a time calls them, but for on_lost and `lost`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._meeting = Meeting(config.tensor_parallel)
        self.split = Split(0, config.tensor_parallel, self._meeting)
        self.device = torch.device(config.device)
        self.on_lost: Callable[[], None] = lambda: None  # called from any thread
        self._team: Team | None = None
        self._has_joined = False
        self._have_ended = True  # the processes of the last team that was stopped
        self._num_losses = 0

    @property
    def num_ranks(self) -> int:
        return self.split.num_ranks

    @property
    def lost(self) -> str:
        """Which rank was lost, and how; empty: none was."""
        return "no rank runs" if self._team is None else self._team.lost

    @property
    def fault(self) -> DeviceFault | None:
        """The fault of the device that was lost to a rank; None: none was."""
        return None if self._team is None else self._team.fault

    @property
    def are_hopeless(self) -> bool:
        """Whether ranks were lost again and again while no request got on; forget_losses reports one that gets on."""
        return self._num_losses >= MOST_LOSSES

    @property
    def have_parted(self) -> bool:
        """Whether one of a team that was started is lost, and no other team was started since."""
        return self._team is not None and bool(self._team.lost)

    @property
    def processes(self) -> list[int]:
        """Process ids of ranks 1 and on."""
        return [] if self._team is None else self._team.processes

    def start(self) -> None:
        """Begin to load the model in all other ranks, if no team is there. Raises ReportedFault."""
        if (fault := self.fault) is not None:
            raise ReportedFault(fault)
        if self.have_parted:
            self._num_losses += 1
            self.stop()
        if self._team is None:
            log.info("starting", doing="starting the other ranks", num_ranks=self.num_ranks)
            configs = [self._make_config(rank) for rank in range(1, self.num_ranks)]
            self._team = Team(configs, self._meeting, self._config.rank_timeout, lambda: self.on_lost())

    def make_ready(self) -> None:
        """Return once all ranks have loaded their parts and have met. See Team.join."""
        self.start()
        assert self._team is not None
        if not self._has_joined:
            self._team.join(self.device)
            self._has_joined = True
            log.info("ranks_met", num_ranks=self.num_ranks)

    def attach(self, attachment: Attachment) -> None:
        """Each maps its arena. Raises RankLost, RankRefused, ReportedFault."""
        self.ask(Kind.ATTACH, json.dumps(dataclasses.asdict(attachment)).encode())

    def detach(self) -> bool:
        """Have them unmap; where one cannot say that it has, all of them are ended. Whether none maps anything any more."""
        if self._team is None:
            return self._have_ended
        try:
            self.ask(Kind.DETACH)
        except (RankLost, RankRefused, ReportedFault) as error:
            self._team.lose(f"a rank cannot unmap: {error}", is_ours=True)  # no other team is started while none is lost
            return self._team.stop()
        return True

    def send_all(self, kind: Kind, body: bytes = b"") -> None:
        """A message to all. Raises RankLost, ReportedFault."""
        self._required().send_all(kind, body)

    def hear(self) -> list[bytearray]:
        """The answers of all. Raises RankLost, RankRefused, ReportedFault."""
        return self._required().hear()

    def forget_losses(self) -> None:
        """Requests get on: the ranks that were lost until now do not count any more."""
        self._num_losses = 0

    def ask(self, kind: Kind, body: bytes = b"") -> None:
        """Send a message to all and wait for the reply of each; it is no step. Raises RankLost, RankRefused, ReportedFault."""
        team = self._required()
        team.send_all(kind, body)
        team.hear()

    def lose(self, why: str, *, is_ours: bool) -> RankLost | ReportedFault:
        """The ranks cannot go on together; the error for it. is_ours: the first rank is why, and not one of the others."""
        return self._required().lose(why, is_ours=is_ours)

    def stop(self) -> None:
        """End all of them. Idempotent."""
        team, self._team, self._has_joined = self._team, None, False
        if team is not None:
            self._have_ended = team.stop()

    def _required(self) -> Team:
        if self._team is None:
            raise RankLost("no rank runs")
        return self._team

    def _make_config(self, rank: int) -> dict[str, Any]:
        """Fields of a rank's EngineConfig. On CUDA, rank r is on the device r behind the first one's."""
        device = "cpu" if self.device.type == "cpu" else f"cuda:{(self.device.index or 0) + rank}"
        return {name: getattr(self._config, name) for name in _SHARED_SETTINGS} | {"device": device}


def make_attachment(session: AsyncCacheSession, packing: HostBlocks | None, *, has_groups: bool) -> Attachment:
    """That of a session. packing: how its host tier keeps blocks of each rank, if not as they are."""
    pool = session.pool
    return Attachment(
        *session.attach_point,
        pool.arena_bytes,
        pool.host_arena_bytes,
        pool.block_bytes,
        pool.block_size,
        has_groups,
        pool.host_block_bytes or pool.block_bytes,
        packing_fields(packing),
    )
