"""MissCounts: the tokens that starts looked up and did not find, by cause.

Owns the counts, and the blocks whose cause is to be looked up in the eviction log. Rules: every token of a look-up that is not
found has one cause, so that the counts add up to tokens looked up minus tokens found, at any time; a cause is that of the
moment of the look-up. Blocks are noted in a step and counted after its reply, many at once: what left the index meanwhile does
not count, because removals are numbered. Tenants, and pairs of them, are named while there are few; the others are counted
together. Knows no sequence.
"""

from typing import NamedTuple

import numpy as np

from ..values.types import NO_TENANT, EvictionNeed, Int32Array, MatchEnd
from .eviction_log import EvictionLog

AGES = (0.25, 1.0, 4.0)  # turnovers of the pool since an eviction, up to which it is counted apart
OTHERS = 1  # in the place of a tenant: those that are not counted apart
_MOST_KINDS = 1024
_MOST_NOTED, _MOST_NOTED_TOKENS = 64, 1 << 15  # counted in less than a millisecond
_MOST_PUT_OFF = 4  # times as many


class MissKind(NamedTuple):
    """What is counted together. tenant: that looked up. The rest is of evicted blocks alone.

    by: the tenant for which they were evicted, or NO_TENANT. age: how many of AGES have passed since.
    """

    tenant: int
    cause: MatchEnd
    need: EvictionNeed = EvictionNeed.NOT_EVICTED
    by: int = NO_TENANT
    age: int = 0


class LookUp(NamedTuple):
    """A start that did not find all of its tokens. Of these: the end, that is always computed; what it does not share, or did
    not ask for; and whole blocks that it could have found, behind a node or a root with the digest `above`.

    num_counted: the first of those blocks that have a cause already, num_others: that another scope has cached. num_removed:
    nodes, from the index, when that was.
    """

    tenant: int
    num_end: int
    num_apart: int
    num_not_asked: int
    above: int
    tokens: Int32Array
    num_counted: int
    num_others: int
    num_removed: int


class MissCounts:
    """What the look-ups of one pool missed."""

    def __init__(self, log: EvictionLog, block_size: int, num_blocks: int) -> None:
        """num_blocks: what the pool keeps in memory."""
        self._log, self._size, self._num_blocks = log, block_size, num_blocks
        self._tokens: dict[MissKind, int] = {}
        self._noted: list[LookUp] = []
        self._num_noted_tokens = 0

    def add(self, num_tokens: int, kind: MissKind) -> None:
        """So many tokens were not found, or less than none: then their cause turned out to be another."""
        if not num_tokens:
            return
        if kind not in self._tokens and len(self._tokens) >= _MOST_KINDS:
            kind = kind._replace(tenant=OTHERS, by=kind.by and OTHERS)
        self._tokens[kind] = self._tokens.get(kind, 0) + num_tokens

    def end_load(self, tenant: int, num_awaited: int, num_found: int) -> None:
        """A load that a start waited for has ended, or is waited for no more: so many tokens came, and were found."""
        self.add(-num_awaited, MissKind(tenant, MatchEnd.LOADING))
        self.add(num_awaited - num_found, MissKind(tenant, MatchEnd.NOT_LOADED))

    def note(self, look_up: LookUp) -> None:
        """To be counted."""
        self._noted.append(look_up)
        num_behind = len(look_up.tokens) - look_up.num_counted * self._size
        self._num_noted_tokens += num_behind + look_up.num_end + look_up.num_apart + look_up.num_not_asked
        if self._is_much(_MOST_PUT_OFF):
            self._count()

    def prepare(self) -> None:
        """Counts much of what was noted. For the time when no reply waits."""
        if self._is_much(1):
            self._count()

    def counts(self) -> dict[MissKind, int]:
        """Tokens by kind."""
        if self._noted:
            self._count()
        return {kind: num_tokens for kind, num_tokens in self._tokens.items() if num_tokens}

    def num_tokens(self) -> int:
        """All that were not found."""
        return sum(self._tokens.values()) + self._num_noted_tokens

    def _is_much(self, times: int) -> bool:
        return len(self._noted) >= times * _MOST_NOTED or self._num_noted_tokens >= times * _MOST_NOTED_TOKENS

    def _count(self) -> None:
        noted, self._noted, self._num_noted_tokens = self._noted, [], 0
        for each in noted:
            self.add(each.num_end, MissKind(each.tenant, MatchEnd.PARTIAL_BLOCK))
            self.add(each.num_apart, MissKind(each.tenant, MatchEnd.BEHIND_A_HOLE))
            self.add(each.num_not_asked, MissKind(each.tenant, MatchEnd.NOT_ASKED))
        noted = [each for each in noted if len(each.tokens)]
        if noted:
            self._count_blocks(noted)

    def _count_blocks(self, noted: list[LookUp]) -> None:
        log, counts = self._log, np.array([len(each.tokens) // self._size for each in noted])
        digests = np.concatenate([log.digests(each.above, each.tokens) for each in noted])
        tenants, num_counted, num_others, since = np.repeat(
            [(each.tenant, each.num_counted, each.num_others, log.num_removed - each.num_removed) for each in noted],
            counts,
            axis=0,
        ).T
        last = log.find(digests, since)
        places = np.arange(len(digests)) - np.repeat(np.cumsum(counts) - counts, counts)
        causes = np.where(last.causes > 0, last.causes, int(MatchEnd.NEVER_STORED)).astype(np.int64)
        causes[(last.causes == 0) & (places < num_others)] = MatchEnd.OTHER_TENANT
        is_evicted = causes == MatchEnd.EVICTED
        ages = np.searchsorted(np.array(AGES) * self._num_blocks, last.ages - since)
        kinds = (-tenants << 32) + (causes << 24) + np.where(is_evicted, (ages << 20) - last.needs, 0)
        kinds, num_each = np.unique(kinds[places >= num_counted], return_counts=True)
        for kind, num_blocks in zip(kinds.tolist(), num_each.tolist(), strict=True):
            tenant, cause, age, by = -(kind >> 32), MatchEnd(kind >> 24 & 0xFF), kind >> 20 & 0xF, -(kind & 0xF_FFFF)
            self.add(num_blocks * self._size, MissKind(tenant, cause, _need(tenant, cause, by), by, age))


def _need(tenant: int, cause: int, by: int) -> EvictionNeed:
    if cause != MatchEnd.EVICTED:
        return EvictionNeed.NOT_EVICTED
    if by == NO_TENANT:
        return EvictionNeed.NO_TENANT
    return EvictionNeed.OWN if by == tenant else EvictionNeed.OTHER
