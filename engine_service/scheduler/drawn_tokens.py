"""DrawnTokens: appends the tokens that a step draws, and counts the guesses that it checked.

A running sequence's tokens grow in its row; an unforked sequence can be forked once it has its first token. Pure.
"""

from collections import Counter

import numpy as np

from ..values.request import Int32Array, SequenceState
from .state.scheduler_state import SchedulerState
from .work import Work


class DrawnTokens:
    """Appends drawn tokens to their sequences, and counts them."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def histories(self, work: Work) -> list[Int32Array]:
        """The tokens before each drawn token, in the order of work.logit_idx; views, valid until the tokens are appended."""
        running, num_rows = self._state.running, len(work.sample_rows)
        lens = running.num_tokens[work.sample_rows].tolist()
        rows = zip(work.sample_rows.tolist(), lens, work.guesses, strict=False)
        histories = [running.tokens[row, : length + place] for row, length, own in rows for place in range(len(own) + 1)]
        return histories + [child.token_ids for child in work.sampled[num_rows:]]

    def append(self, work: Work, drawn: Int32Array) -> list[Int32Array]:
        """The work is done; drawn [len(work.logit_idx)] are the next tokens. Answers the new tokens of each of work.sampled.

        That is one token, and one more for each leading guess that equals the token drawn at its place.
        """
        state = self._state
        running, shares = state.running, state.waiting.shares
        running.num_computed[work.rows] += np.where(running.discarded[work.rows], 0, work.num_new)
        running.num_computing[work.rows] = running.num_drawing[work.rows] = 0
        num_rows = len(work.sample_rows)
        if len(drawn) == len(work.sampled):
            running.append_tokens(work.sample_rows, drawn[:num_rows])
            running.num_left[work.sample_rows] -= 1
            taken = list(drawn[:, None])
            for sequence in work.sampled:
                sequence.num_output += 1
        else:
            taken = self._append_runs(work, drawn)
            for sequence, token_ids in zip(work.sampled, taken, strict=True):
                sequence.num_output += len(token_ids)
        if shares is not None:
            num_new = Counter[str]()
            for sequence, token_ids in zip(work.sampled, taken, strict=True):
                num_new[shares.tenant_of(sequence.request)] += len(token_ids)
            for tenant, num_tokens in num_new.items():
                shares.charge(tenant, num_tokens)
        for child, token_ids in zip(work.sampled[num_rows:], taken[num_rows:], strict=True):
            child.token_ids = np.append(child.request.prompt, token_ids).astype(np.int32)
            if child.state is not SequenceState.ENDED:  # it may have ended while this was computed
                state.unforked[child] = None
        return taken

    def _append_runs(self, work: Work, drawn: Int32Array) -> list[Int32Array]:
        """As append. The slots of guesses that were not kept are computed again, with other tokens."""
        running, taken, first = self._state.running, [], 0
        for guesses in work.guesses:
            own = drawn[first : first + len(guesses) + 1]
            first += len(own)
            taken.append(own[: num_kept(guesses, own) + 1])
        for row, guesses, token_ids in zip(work.sample_rows.tolist(), work.guesses, taken, strict=False):
            running.num_computed[row] -= len(guesses) + 1 - len(token_ids)
            running.append_run(row, token_ids)
            running.num_left[row] -= len(token_ids)
        return taken

    def give_up(self, work: Work) -> None:
        """The work failed: the tokens counted on do not come. Its requests have ended or are about to end."""
        running = self._state.running
        running.num_computing[work.rows] = running.num_drawing[work.rows] = 0


def num_kept(guesses: Int32Array, drawn: Int32Array) -> int:
    """How many leading guesses [n] equal the tokens drawn [n + 1] at their positions."""
    differ = guesses != drawn[: len(guesses)]
    return int(np.argmax(differ)) if differ.any() else len(guesses)
