"""Planner: decides which tokens of which sequences the next step computes.

Running sequences come before starts, and starts come in the order of the policy in force (policies.py). Of the running ones,
decodes come before prompts, and prompts in the order of their rows. Where clients share steps, the many sequences of one wait
for the few of another (client_shares.py). Where more decode than a step may, they take turns. headroom.py has the rules for a
shortage of blocks. The next step is planned while one is computed, and counts on the tokens that will come. All rows are
columns; what a step does not have costs it one look. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..values.request import Int32Array, Request, Sequence, SequenceState
from .client_shares import PromptRoom, out_of_share
from .forks import Forks
from .plan import Plan, StepWait
from .running import NO_ROWS, IndexArray, Int64Array, choose
from .scheduler_state import SchedulerState

NO_GUESSES: Mapping[int, Int32Array] = MappingProxyType({})


@dataclass(slots=True)
class Budget:
    """Tokens that a step may compute yet. room: for the prompts of each client; None: there is room for all."""

    num_tokens: int
    num_prompt_tokens: int  # at most, of these
    waits: list[StepWait]  # of what gets nothing
    room: PromptRoom | None = None

    def take_room(self, client: str, num_tokens: int) -> int:
        """Take room for a prompt of the client. Returns how many of its tokens the step may compute; 0: no room is left."""
        taken = num_tokens if self.room is None else self.room.take(client, num_tokens)
        if not taken and StepWait.SHARES not in self.waits:
            self.waits.append(StepWait.SHARES)
        return taken


class Planner:
    """Makes the plan of a step from what runs and what waits."""

    def __init__(self, state: SchedulerState, forks: Forks) -> None:
        self._state = state
        self._forks = forks

    def plan(self, now: float, guesses: Mapping[int, Int32Array] = NO_GUESSES) -> Plan:
        """Plan a step; changes nothing but the next id and, with the load, the order of the waiting.

        now: seconds, by the clock of the arrivals.
        guesses: by row of a decoding sequence, tokens that may follow; as many are checked as fit the budget.
        """
        state = self._state
        running, limits, live = state.running, state.limits, state.running.live
        self._note_time(now)
        # What ended comes first of what a step has few of: its rows are free for all that follows.
        ended_rows, swap_rows, num_staying = self._ends(live)
        num_items = limits.max_step_items - len(ended_rows) - len(swap_rows)
        num_free_rows, promised = running.num_rows - len(live) - num_staying - len(state.loading), self.promised_rows()
        forks = self._forks.plan(num_free_rows - promised.total(), num_items)
        for child in forks:
            if child.request in promised:
                promised[child.request] -= 1
        releases = state.waiting.releases[: num_items - len(forks)]
        num_free_rows, num_items = num_free_rows - len(forks), num_items - len(forks) - len(releases)
        may_start = bool(state.waiting.sequences) and (num_free_rows > 0 or promised.total() > 0)
        rows, computed, num_new, budget = self._continue_rows(live, len(forks), may_start=may_start)
        if guesses:
            guesses, num_guessed = self._fit_guesses(guesses, rows, num_new, budget.num_tokens)
            num_new, budget.num_tokens = num_new + num_guessed, budget.num_tokens - int(num_guessed.sum())
        starts: dict[Sequence, int] = {}
        swapped_in: list[Sequence] = []
        if may_start and self._has_room(live, rows, computed + num_new, len(forks)):
            starts, swapped_in = self._plan_starts(budget, num_free_rows, promised, num_items)
        return Plan(
            **self._commits(),
            **self._reservations(rows, computed, num_new, forks),
            guesses=guesses,
            **self._releases(ended_rows, swap_rows, releases),
            **_columns_of_starts(starts, swapped_in),
            waits=tuple(budget.waits),
        )

    def _note_time(self, now: float) -> None:
        state = self._state
        state.loads_have_failed = False
        state.waiting.now = max(now, state.waiting.now)
        state.waiting.measure(min(state.limits.prefill_budget, state.limits.token_budget))

    def _ends(self, live: IndexArray) -> tuple[IndexArray, IndexArray, int]:
        """Rows to release, and rows to swap out; and how many stay until what the device computes for them is known."""
        running, order = self._state.running, self._state.running.order
        if live is order:
            return NO_ROWS, NO_ROWS, 0
        rows = order[running.ended[order] & ~running.kept[order]]
        leaving = choose(~running.completing[rows] | (running.num_computing[rows] == 0), rows)[0]
        num_staying, leaving = len(rows) - len(leaving), leaving[: self._state.limits.max_step_items]
        is_swap = running.swapping[leaving]
        return leaving[~is_swap], leaving[is_swap], num_staying

    def _continue_rows(
        self, live: IndexArray, num_forks: int, *, may_start: bool
    ) -> tuple[IndexArray, Int32Array, Int32Array, Budget]:
        """The live rows that compute in this step; the tokens that each has computed by then, and computes now."""
        running, limits = self._state.running, self._state.limits
        num_drawing = running.num_drawing[live]
        live, num_drawing = choose(running.num_left[live] > num_drawing, live, num_drawing)
        if num_waiting := self._count_constrained(live, num_drawing):
            live, num_drawing = choose((num_drawing == 0) | ~running.constrained[live], live, num_drawing)
        computed = running.num_computed[live] + running.num_computing[live]
        remaining = running.num_tokens[live] + num_drawing - computed
        num_new, budget = share_budget(self._state, live, computed, remaining, num_forks, may_start=may_start)
        if num_waiting:
            budget.waits.append(StepWait.CONSTRAINTS)
        if limits.has_states and self._compute_all_granted(live, num_new):
            budget.waits.append(StepWait.FORKS)
        if (running.num_retaining or running.num_groups > 1) and self._hold_back(live, num_new):
            budget.waits.append(StepWait.BLOCKS)
        return *choose(num_new > 0, live, computed, num_new), budget

    def _count_constrained(self, live: IndexArray, num_drawing: Int32Array) -> int:
        """How many of these rows the step leaves out, because what they may draw follows from tokens that are drawn now.

        The step can then be started before those are known. Where these rows are the most, it waits for their tokens instead:
        in turns, each would get a token in every second step.
        """
        state = self._state
        if not (state.running.num_constrained and state.runs_ahead):
            return 0
        count = int(np.count_nonzero(state.running.constrained[live] & (num_drawing > 0)))
        return count if 2 * count <= len(live) else 0

    def _fit_guesses(
        self, guesses: Mapping[int, Int32Array], rows: IndexArray, num_new: Int32Array, budget: int
    ) -> tuple[dict[int, Int32Array], Int32Array]:
        """The guesses, for rows that compute their last token, that fit the budget and the requests' limits."""
        fitting: dict[int, Int32Array] = {}
        num_guessed = np.zeros_like(num_new)
        running = self._state.running
        is_last = running.num_computed[rows] + num_new == running.num_tokens[rows]
        for at in np.flatnonzero(is_last).tolist():
            row = int(rows[at])
            sequence = running.sequences[row]
            if row in guesses and sequence is not None:
                most = min(budget, int(running.num_left[row]) - 1)
                if (kept := guesses[row][: max(most, 0)]).size:
                    fitting[row], num_guessed[at] = kept, len(kept)
                    budget -= len(kept)
        return fitting, num_guessed

    def _hold_back(self, live: IndexArray, num_new: Int32Array) -> bool:
        """Bound the blocks that sequences with holes take, because those that they give back show only in the next step.

        Beside other sequences, a chunk takes at most half of the blocks that are left, so that no other sequence has to give
        way for blocks that come back at once. A sequence is left out if the pool cannot hold its next token beside the tokens
        that the device computes for it now. It fits in the next step, because the tokens that it keeps fit the pool. Returns
        whether one is left out.
        """
        state = self._state
        running, size = state.running, state.limits.block_size
        windows, computed = running.num_window[live], running.num_computed[live]
        computing = computed + running.num_computing[live]
        if len(live) > 1:
            most = running.num_blocks[live] * size - computing + state.headroom.most_at_once * size
            np.minimum(num_new, np.maximum(most, 1), out=num_new, where=windows > 0)
        num_usable = state.limits.num_usable_blocks
        num_holes = np.maximum((computed - windows) // size + -running.num_sink[live] // size, 0)
        num_before = np.count_nonzero(num_new)
        num_new[(windows > 0) & (computing >= (num_usable + num_holes) * size)] = 0
        if running.num_groups > 1:
            num_new[state.limits.num_held(computed, computing + 1) > num_usable] = 0
        return bool(np.count_nonzero(num_new) < num_before)

    def _compute_all_granted(self, live: IndexArray, num_new: Int32Array) -> bool:
        """Have steps end where a grant ends, because states are kept of its last token, and of no token before it.

        Sequences that are about to be forked wait for that: behind the fork their state is another one. Returns whether one
        does.
        """
        running = self._state.running
        granted = running.num_reserved[live] - running.num_computed[live] - running.num_computing[live]
        np.maximum(num_new, granted, out=num_new, where=num_new > 0)
        num_before = np.count_nonzero(num_new)
        is_first = (running.num_drawing[live] > 0) & (running.num_tokens[live] == running.num_prompt[live])
        for at in is_first.nonzero()[0].tolist():
            sequence = running.sequences[live[at]]
            if sequence is not None and not sequence.index and sequence.request.unforked:
                num_new[at] = 0
        return bool(np.count_nonzero(num_new) < num_before)

    def _has_room(self, live: IndexArray, rows: IndexArray, lens: Int32Array, num_forks: int) -> bool:
        """Whether sequences may start beside these rows, which grow to so many tokens."""
        state = self._state
        if not state.loading and len(live) == len(state.resting()):
            return True  # nothing runs but lists that rest
        return state.headroom.allows_starts(state.limits.num_granted(state.running.num_blocks[rows], lens) + num_forks)

    def _plan_starts(
        self, budget: Budget, num_free_rows: int, promised: Counter[Request], most: int
    ) -> tuple[dict[Sequence, int], list[Sequence]]:
        """The waiting sequences that may start, with the most new tokens of each, and those that may be swapped in; at most so
        many.

        A beam search starts when there are rows for all of its lists. Sequences without room for their prompts are passed over.
        """
        state, num_left = self._state, min(budget.num_tokens, budget.num_prompt_tokens)
        chunk_size, headroom = state.limits.chunk_size, state.headroom
        starts: dict[Sequence, int] = {}
        swapped_in: list[Sequence] = []
        num_free_rows -= promised.total()
        passed_over: set[str] = set()
        for sequence in state.waiting.in_order(passed_over):
            if not num_left or len(starts) + len(swapped_in) >= most or (num_free_rows <= 0 and not promised.total()):
                break
            request = sequence.request
            num_new = min(chunk_size, len(sequence.token_ids), num_left)
            if not promised[request] and sequence.state is not SequenceState.SWAPPED:
                num_new = budget.take_room(request.client, num_new)
            if not num_new:
                passed_over.add(request.client)
                continue
            if promised[request]:
                promised[request] -= 1
            elif num_free_rows >= request.num_rows:
                num_free_rows -= request.num_rows
                promised[request] += request.num_rows - 1
            else:
                num_free_rows = 0  # no later one takes the rows that it waits for
                continue
            if sequence.state is SequenceState.SWAPPED:
                swapped_in.append(sequence)
            else:
                starts[sequence] = num_new
                num_left -= num_new
            if headroom.was_refused(sequence):
                break
        return starts, swapped_in

    def promised_rows(self) -> Counter[Request]:
        """Rows reserved for lists of running searches that do not exist yet."""
        running, loading, promised = self._state.running, self._state.loading, Counter[Request]()
        if not running.num_searching and not loading:
            return promised
        starting = (sequence for sequence in loading.values() if sequence.request.num_beams is not None)
        held = (*running.at(running.searching), *starting)
        for request, num_held in Counter(sequence.request for sequence in held).items():
            promised[request] = request.num_rows - num_held
        return promised

    # -- the columns of what was decided; none of what a step does not have

    def _commits(self) -> dict[str, Any]:
        """The tokens that were computed since the last step, and those of which the cache service does not know the ids."""
        running, order = self._state.running, self._state.running.order
        lens = running.num_computed[order]
        rows, lens = choose(lens > running.num_committed[order], order, lens)
        first_new = running.num_known[rows]
        num_new = running.num_tokens[rows] - first_new
        return {
            "commit_ids": running.sequence_ids[rows],
            "commit_lens": lens,
            "commit_num_new": num_new,
            "commit_tokens": running.gather_tokens(rows, first_new, num_new),
            "commit_rows": rows,
        }

    def _reservations(
        self, rows: IndexArray, computed: Int32Array, num_new: Int32Array, forks: list[Sequence]
    ) -> dict[str, Any]:
        """Reservations of rows, which compute num_new tokens behind computed ones, and of forks, which compute their last."""
        ids, least, most = self._state.running.sequence_ids[rows], computed + 1, computed + num_new
        if not forks:
            return {"reserve_ids": ids, "reserve_min": least, "reserve_max": most, "reserve_rows": rows}
        child_ids = np.array([self._state.waiting.draw_id() for _ in forks], np.int64)
        lens = _column([len(child.token_ids) for child in forks])
        return {
            "fork_parents": _ids(child.parent for child in forks if child.parent is not None),
            "fork_children": child_ids,
            "fork_lens": lens - 1,
            "forked": tuple(forks),
            "reserve_ids": np.concatenate((ids, child_ids)),
            "reserve_min": np.concatenate((least, lens)),
            "reserve_max": np.concatenate((most, lens)),
            "reserve_rows": rows,
        }

    def _releases(self, ended: IndexArray, swapped: IndexArray, ids: list[int]) -> dict[str, Any]:
        """What is released, of rows and of ids without a row, and the rows that are swapped out."""
        if not (len(ended) or len(swapped) or ids):
            return {}
        running = self._state.running
        return {
            "release_ids": np.concatenate((running.sequence_ids[ended], np.array(ids, np.int64))),
            "swap_out_ids": running.sequence_ids[swapped],
            "released": tuple(running.at(ended)),
            "swapped_out": tuple(running.at(swapped)),
        }


def _columns_of_starts(starts: Mapping[Sequence, int], swapped_in: list[Sequence]) -> dict[str, Any]:
    """starts: with the most new tokens of each."""
    if not (starts or swapped_in):
        return {}
    looks_up = _column([sequence.request.look_up for sequence in starts])
    return {
        "swap_in_ids": _ids(swapped_in),
        "start_ids": _ids(starts),
        "start_max_new": _column(list(starts.values())),
        # One token is left to compute, also where stored logits could follow the whole prompt: the sampler wants a pass.
        "start_max_hit": _column([len(sequence.token_ids) - 1 for sequence in starts]) * looks_up,
        # A sequence that computes the same prefix now shares it when it has, which costs less than computing it twice.
        "start_may_wait": looks_up,
        "swapped_in": tuple(swapped_in),
        "started": tuple(starts),
    }


def _ids(sequences: Iterable[Sequence]) -> Int64Array:
    return np.array([sequence.sequence_id for sequence in sequences], np.int64)


def _column(values: list[int]) -> Int32Array:
    return np.array(values, np.int32)


# -- how the running rows share the budget


def share_budget(
    state: SchedulerState, live: IndexArray, computed: Int32Array, remaining: Int32Array, num_forks: int, *, may_start: bool
) -> tuple[Int32Array, Budget]:
    """Tokens to compute for each live row, of those that remain; then the budget left over."""
    limits, running = state.limits, state.running
    decodes = (remaining == 1) & (computed >= running.num_prompt[live])
    num_decodes = int(np.count_nonzero(decodes))
    has_prompts = num_decodes < len(live)
    prompts = np.where(decodes, 0, np.minimum(remaining, limits.chunk_size)) if has_prompts else None
    waits: list[StepWait] = []
    if limits.client_shares and running.num_clients > 1 and (num_left_out := _keep_to_shares(state, live, decodes)):
        num_decodes -= num_left_out
        waits.append(StepWait.SHARES)
    if num_decodes > limits.decode_budget:
        # Each step, the turn advances by the number that may run.
        at, num_decodes = np.flatnonzero(decodes), limits.decode_budget
        decodes[np.roll(at, -num_decodes * state.num_plans % len(at))[num_decodes:]] = False
        waits.append(StepWait.TURNS)
    left = limits.token_budget - num_forks - num_decodes
    budget = Budget(left, min(limits.prefill_budget, left), waits)
    wants_room = (has_prompts or may_start) and limits.client_shares and num_decodes
    if wants_room and (decode_seconds := state.decode_costs.estimate_seconds(num_decodes)) is not None:
        budget.room = PromptRoom(state.prompt_shares, decode_seconds, running.get_clients(live[decodes]))
    num_new = decodes.astype(np.int32)
    if prompts is not None:
        num_new += _share_prompts(state, live, prompts, budget)
    return num_new, budget


def _share_prompts(state: SchedulerState, live: IndexArray, prompts: Int32Array, budget: Budget) -> Int32Array:
    """What the budget has for these prompt tokens of each row; takes it from there."""
    if budget.room is not None:
        for at in np.flatnonzero(prompts).tolist():
            prompts[at] = budget.take_room(state.running.get_client(live[at]), int(prompts[at]))
    before = np.cumsum(prompts) - prompts
    prompts = np.clip(budget.num_prompt_tokens - before, 0, prompts).astype(np.int32)
    num_prompt = int(prompts.sum())
    budget.num_tokens -= num_prompt
    budget.num_prompt_tokens -= num_prompt
    return prompts


def _keep_to_shares(state: SchedulerState, live: IndexArray, decodes: npt.NDArray[np.bool_]) -> int:
    """Take those off that wait for other clients' sequences. Returns how many these are."""
    if (fixed := state.decode_costs.fixed_sequences) is None:
        return 0
    at = np.flatnonzero(decodes)
    waiting = at[out_of_share(state.running.clients[live[at]], fixed, state.num_plans)]
    decodes[waiting] = False
    return len(waiting)
