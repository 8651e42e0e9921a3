"""DrawnTokens: appends the tokens that a step draws, and counts the guesses that it checked.

A running sequence's tokens grow in its row; an unforked sequence can be forked once it has its first token. A sequence may have
ended since its step began, in the step before, which was still computed then: what the later one did for it counts no more, and
its row may be another sequence's. Pure.
"""

import numpy as np
import numpy.typing as npt

from ..values.request import NO_TOKENS, Int32Array, Sequence, SequenceState
from .plan import NewTokens, Work
from .running import RunningSequences, choose
from .scheduler_state import SchedulerState
from .waiting import FairShare

_MOST_TENANTS = 4096  # that are remembered


class DrawnTokens:
    """Appends drawn tokens to their sequences, and counts them."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._lanes = _Lanes()

    def histories(self, work: Work) -> list[Int32Array]:
        """The tokens before each drawn token, in the order of work.logit_idx; views, valid until the tokens are appended.

        Without the one that is awaited, where there is one.
        """
        running, num_rows = self._state.running, len(work.sample_rows)
        lens = running.num_tokens[work.sample_rows].tolist()
        rows = zip(work.sample_rows.tolist(), lens, work.guesses, strict=False)
        histories = [running.tokens[row, : length + place] for row, length, own in rows for place in range(len(own) + 1)]
        return histories + [child.token_ids for child in work.sampled[num_rows:]]

    def append(self, work: Work, drawn: Int32Array) -> NewTokens:
        """The work is done; drawn [len(work.logit_idx)] are the next tokens. Returns the new tokens of each of work.sampled.

        That is one token, and one more for each leading guess that equals the token drawn at its place; none for a sequence
        that has ended before.
        """
        state = self._state
        running, shares = state.running, state.waiting.shares
        counts = self._settle(work)
        rows, num_new = choose(counts, work.rows, work.num_new)
        running.num_computed[rows] += num_new
        if rows is not work.rows:
            self._complete(work)
        num_rows = len(work.sample_rows)
        taken: NewTokens
        if len(drawn) == len(work.sampled) and rows is work.rows:
            running.append_tokens(work.sample_rows, drawn[:num_rows])
            running.num_left[work.sample_rows] -= 1
            taken, num_taken = drawn[:, None], np.ones(len(drawn), np.int64)
        else:
            has_ended = set(work.rows[~counts].tolist())
            taken = self._append_runs(work, drawn, has_ended)
            num_taken = np.fromiter(map(len, taken), np.int64, len(taken))
        if shares is not None:
            self._lanes.charge(shares, running, work, num_taken)
        for child, token_ids in zip(work.sampled[num_rows:], taken[num_rows:], strict=True):
            child.token_ids = np.append(child.request.prompt, token_ids).astype(np.int32)
            if child.state is not SequenceState.ENDED:  # it may have ended while this was computed
                state.unforked[child] = None
        return taken

    def _settle(self, work: Work) -> npt.NDArray[np.bool_]:
        """The device is at this work no more. Of which of its rows it counts: that have the sequence still, and not ended."""
        running = self._state.running
        is_same = running.serials[work.rows] == work.serials
        rows, num_new = choose(is_same, work.rows, work.num_new)
        running.num_computing[rows] -= num_new
        drawing = work.sample_rows
        if rows is not work.rows:
            drawing = np.intersect1d(drawing, rows, assume_unique=True)
        running.num_drawing[drawing] -= 1
        return is_same & ~running.discarded[work.rows]

    def _complete(self, work: Work) -> None:
        """The tokens that rows had which have ended meanwhile are computed."""
        running = self._state.running
        is_late = (running.serials[work.rows] == work.serials) & running.completing[work.rows]
        rows, num_new = choose(is_late, work.rows, work.num_new)
        running.num_computed[rows] = np.minimum(running.num_computed[rows] + num_new, running.num_tokens[rows])

    def _append_runs(self, work: Work, drawn: Int32Array, has_ended: set[int]) -> list[Int32Array]:
        """As append. The slots of guesses that were not kept are computed again, with other tokens. has_ended: rows."""
        running, taken, first = self._state.running, [], 0
        for guesses in work.guesses:
            own = drawn[first : first + len(guesses) + 1]
            first += len(own)
            taken.append(own[: num_kept(guesses, own) + 1])
        for at, row in enumerate(work.sample_rows.tolist()):
            if row in has_ended:
                taken[at] = NO_TOKENS
                continue
            running.num_computed[row] -= len(work.guesses[at]) + 1 - len(taken[at])
            running.append_run(row, taken[at])
            running.num_left[row] -= len(taken[at])
        return taken

    def give_up(self, work: Work) -> list[Sequence]:
        """The work failed: the tokens counted on do not come. The sequences that they were for, whose requests are to end."""
        return [sequence for sequence, counts in zip(work.sequences, self._settle(work).tolist(), strict=True) if counts]


class _Lanes:
    """Which tenant's share each row counts for, asked once for a row's sequence and not with each of its tokens."""

    def __init__(self) -> None:
        self._tenants: dict[str, int] = {}
        self._running: RunningSequences | None = None  # whose rows these are
        self._numbers = np.zeros(0, np.int64)  # of the tenant, by row
        self._serials = np.zeros(0, np.int64)  # of the sequence that it was asked for, by row

    def charge(self, shares: FairShare, running: RunningSequences, work: Work, num_new: npt.NDArray[np.int64]) -> None:
        """Each of work.sampled got so many new tokens."""
        rows = work.sample_rows
        for sequence, count in zip(work.sampled[len(rows) :], num_new[len(rows) :].tolist(), strict=True):
            shares.charge(shares.tenant_of(sequence.request), count)
        if not len(rows):
            return
        if running is not self._running or len(self._tenants) > _MOST_TENANTS:
            self._running = running
            self._tenants.clear()
            self._numbers, self._serials = np.zeros((2, running.num_rows), np.int64)
        serials = work.serials if len(work.serials) == len(rows) else work.serials[np.isin(work.rows, rows)]
        for at in np.flatnonzero(self._serials[rows] != serials).tolist():
            tenant = shares.tenant_of(work.sampled[at].request)
            self._numbers[rows[at]] = self._tenants.setdefault(tenant, len(self._tenants))
        self._serials[rows] = serials
        counts = np.bincount(self._numbers[rows], num_new[: len(rows)]).astype(np.int64)
        tenants = list(self._tenants)
        for number in np.flatnonzero(counts).tolist():
            shares.charge(tenants[number], int(counts[number]))


def num_kept(guesses: Int32Array, drawn: Int32Array) -> int:
    """How many leading guesses [n] equal the tokens drawn [n + 1] at their positions."""
    differ = guesses != drawn[: len(guesses)]
    return int(np.argmax(differ)) if differ.any() else len(guesses)
