"""HintRecord: what the hints of each tenant have been worth, so that wrong ones cost little, and others nothing.

A hint is of the end of a prefix, and what comes of it is seen whether it was heeded or not: a later sequence goes on behind
this end before the pool's contents have been replaced a few times and the time that was said is over, or none does. So a tenant
whose hints count for nothing is trusted again as soon as they would have been right.

Rules. Hints of a kind count while no more than half of the tenant's last ones were wrong: after NONE a sequence went on, after
SOON none did. An end is known by the digest of its whole prefix, so blocks that were evicted meanwhile are recognised. An end
that another table holds is not judged, because what goes on there may have begun before. What nearly all sequences of the pool
and of the tenant say distinguishes nothing. Where too many ends are watched, the oldest are forgotten without a judgement.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from ..index.eviction_log import UInt64Array
from ..values.types import ReuseHint

MOST_ALIKE = 0.9  # of the sequences that ended of late: a hint that more of them gave distinguishes nothing
SPAN = 32  # sequences that "of late" is about
LEAST_ENDED = 8  # sequences, before it is known what most of them say
TURNOVERS = 4  # that an end is watched for: what comes back later no order would have kept
MOST_WRONG = 0.5  # of a tenant's last hints of a kind
JUDGED_SPAN = 16  # hints that "last" is about
MOST_WATCHED = 4096  # ends
_NUM_MARKS = 1 << 14  # a power of two


class _Tenant:
    """What the sequences of a tenant said, and how often its hints were wrong."""

    __slots__ = ("num_ended", "shares", "wrong")

    def __init__(self) -> None:
        self.shares = [0.0] * len(ReuseHint)  # of the sequences that ended of late, by hint
        self.num_ended = 0  # sequences
        self.wrong = [0.0] * len(ReuseHint)  # share of the last hints

    def note_end(self, hint: int) -> bool:
        """Whether nearly all sequences that ended of late said this; counts this one."""
        is_common = self.num_ended >= LEAST_ENDED and self.shares[hint] > MOST_ALIKE
        self.num_ended += 1
        for each in ReuseHint:
            self.shares[each] += ((each == hint) - self.shares[each]) / min(self.num_ended, SPAN)
        return is_common


class _End(NamedTuple):
    """An end that is watched, until so many blocks have been published and this time has come. seconds: that were said."""

    digest: int
    tenant: int
    hint: int
    last_number: int
    seconds: float
    until: float


class HintRecord:
    """The record of one pool. An end is known by the digest of its last block's whole prefix."""

    def __init__(self, num_blocks: int) -> None:
        self._window = TURNOVERS * num_blocks
        self._all = _Tenant()
        self._tenants: dict[int, _Tenant] = {}
        self._ends: deque[_End] = deque()
        self._of_digest: dict[int, _End] = {}
        self._marks = np.zeros(_NUM_MARKS, np.uint16)  # ends by digest, so that few blocks of a path are looked up
        self.num_published = 0  # blocks

    def note_end(self, tenant: int, hint: int) -> bool:
        """Whether a sequence's hint distinguishes it; counts it."""
        is_common = self._all.note_end(hint)
        return not (self._tenant(tenant).note_end(hint) and is_common)

    def is_trusted(self, tenant: int, hint: int) -> bool:
        return self._tenant(tenant).wrong[hint] <= MOST_WRONG

    def watch(self, tenant: int, digest: int, hint: int, seconds: float, now: float) -> None:
        """This is said of an end that nothing else holds, for so many seconds. Said again, it counts since the first time."""
        while self._ends and self._ends[0].last_number <= self.num_published:
            self._end_watch(self._ends.popleft(), now)
        last = self._of_digest.get(digest)
        if last is not None and last.hint == hint and last.seconds >= seconds:
            return
        self._drop(last)
        if hint == ReuseHint.UNSPECIFIED:
            return
        if len(self._ends) == MOST_WATCHED:
            self._drop(self._ends.popleft())
        self._put(_End(digest, tenant, hint, self.num_published + self._window, seconds, now + seconds))
        self._marks[digest % _NUM_MARKS] += 1

    def note_path(self, digests: UInt64Array) -> None:
        """A sequence had these blocks [n], so it went on behind the ends among them."""
        for digest in digests[self._marks[digests % np.uint64(_NUM_MARKS)] > 0].tolist():
            if (end := self._of_digest.get(digest)) is not None:
                self._judge(end, went_on=True)

    def _put(self, end: _End) -> None:
        self._ends.append(end)
        self._of_digest[end.digest] = end

    def _end_watch(self, end: _End, now: float) -> None:
        """The contents have been replaced since; where its time is not over, they are to be once more."""
        if end.seconds and end.until > now and self._of_digest.get(end.digest) is end:
            self._put(end._replace(last_number=self.num_published + self._window))
        else:
            self._judge(end, went_on=False)

    def _judge(self, end: _End, *, went_on: bool) -> None:
        if self._drop(end):
            wrong = self._tenant(end.tenant).wrong
            wrong[end.hint] += ((went_on == (end.hint == ReuseHint.NONE)) - wrong[end.hint]) / JUDGED_SPAN

    def _drop(self, end: _End | None) -> bool:
        """Whether it was watched."""
        if end is None or self._of_digest.get(end.digest) is not end:
            return False
        del self._of_digest[end.digest]
        self._marks[end.digest % _NUM_MARKS] -= 1
        return True

    def _tenant(self, tenant: int) -> _Tenant:
        if tenant not in self._tenants:
            self._tenants[tenant] = _Tenant()
        return self._tenants[tenant]
