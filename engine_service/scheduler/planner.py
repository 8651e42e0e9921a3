"""Planner: decides which tokens of which sequences the next step computes.

Running sequences come before starts, and starts come in the order of the policy in force (policies.py). headroom.py has the
rules for a shortage of blocks. The next step is planned while one is computed, and counts on the tokens that will come. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..values.request import Int32Array, Request, Sequence, SequenceState
from .forks import Forks
from .plain_steps import plain_plan
from .plan import Plan
from .state.client_shares import out_of_share
from .state.prompt_shares import PromptRoom
from .state.running import IndexArray, Int64Array
from .state.scheduler_state import SchedulerState

NO_GUESSES: Mapping[int, Int32Array] = MappingProxyType({})


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
        running, waiting, limits = state.running, state.waiting, state.limits
        state.loads_have_failed = False
        waiting.now = max(now, waiting.now)
        waiting.measure(min(limits.prefill_budget, limits.token_budget))
        if not guesses and (plain := plain_plan(state)) is not None:
            return plain
        order = running.order
        commit_rows = order[running.num_computed[order] > running.num_committed[order]]
        first_new, num_tokens = running.num_known[commit_rows], running.num_tokens[commit_rows]
        live = running.live
        num_live, num_free_rows = len(live), running.num_rows - len(live) - len(state.loading)
        promised = self.promised_rows()
        live = live[running.num_left[live] > running.num_drawing[live]]
        # What ended comes first of what a step has few of: its rows are free for all that follows.
        ended_rows = order[running.ended[order] & ~running.kept[order]][: limits.max_step_items]
        num_items = limits.max_step_items - len(ended_rows)
        swap_rows = ended_rows[running.swapping[ended_rows]]
        if len(swap_rows):
            ended_rows = ended_rows[~running.swapping[ended_rows]]
        forks = self._forks.plan(num_free_rows - promised.total(), num_items)
        num_items -= len(forks)
        releases = waiting.releases[:num_items]
        num_items -= len(releases)
        fork_lens = _column(len(child.token_ids) - 1 for child in forks)
        fork_children = np.array([waiting.draw_id() for _ in forks], np.int64)
        num_new, budget, prompt_budget, room = self._share_budget(live, len(forks))
        if limits.has_states:
            self._compute_all_granted(live, num_new)
        if running.num_retaining or running.num_groups > 1:
            self._hold_back(live, num_new)
        reserve_rows, num_new = live[num_new > 0], num_new[num_new > 0]
        computed = running.num_computed[reserve_rows] + running.num_computing[reserve_rows]
        if guesses:
            guesses, num_guessed = self._fit_guesses(guesses, reserve_rows, num_new, budget)
            num_new, budget = num_new + num_guessed, budget - int(num_guessed.sum())
        num_growing = self._num_new_blocks(reserve_rows, computed + num_new) + len(forks)
        for child in forks:
            if child.request in promised:
                promised[child.request] -= 1
        starts: dict[Sequence, int] = {}
        swapped_in: list[Sequence] = []
        nothing_runs = not state.loading and num_live == len(state.resting())  # but lists that rest
        if nothing_runs or state.headroom.allows_starts(num_growing):
            prompt_budget = min(budget, prompt_budget)
            starts, swapped_in = self._plan_starts(prompt_budget, num_free_rows - len(forks), promised, room, num_items)
        start_lens = _column(len(sequence.token_ids) for sequence in starts)
        return Plan(
            commit_ids=running.sequence_ids[commit_rows],
            commit_lens=running.num_computed[commit_rows],
            commit_num_new=num_tokens - first_new,
            commit_tokens=running.gather_tokens(commit_rows, first_new, num_tokens - first_new),
            fork_parents=_ids(child.parent for child in forks if child.parent is not None),
            fork_children=fork_children,
            fork_lens=fork_lens,
            release_ids=np.concatenate((running.sequence_ids[ended_rows], np.array(releases, np.int64))),
            swap_out_ids=running.sequence_ids[swap_rows],
            swap_in_ids=_ids(swapped_in),
            start_ids=_ids(starts),
            start_max_new=_column(starts.values()),
            # One token is left to compute, also where stored logits could follow the whole prompt: the sampler wants a pass.
            start_max_hit=(start_lens - 1) * _column(sequence.request.look_up for sequence in starts),
            # A sequence that computes the same prefix now shares it when it has, which costs less than computing it twice.
            start_may_wait=_column(sequence.request.look_up for sequence in starts),
            reserve_ids=np.concatenate((running.sequence_ids[reserve_rows], fork_children)),
            reserve_min=np.concatenate((computed + 1, fork_lens + 1)),
            reserve_max=np.concatenate((computed + num_new, fork_lens + 1)),
            guesses=guesses,
            commit_rows=commit_rows,
            forked=tuple(forks),
            released=tuple(running.at(ended_rows)),
            swapped_out=tuple(running.at(swap_rows)),
            swapped_in=tuple(swapped_in),
            started=tuple(starts),
            reserve_rows=reserve_rows,
        )

    def _share_budget(self, live: IndexArray, num_forks: int) -> tuple[Int32Array, int, int, PromptRoom | None]:
        """Tokens to compute for each live row, decodes before prompts; then the budget left over, in all and for prompts.

        Last the room for prompts of each client; None: there is room for all.
        """
        limits, running = self._state.limits, self._state.running
        computed = running.num_computed[live] + running.num_computing[live]
        remaining = running.num_tokens[live] + running.num_drawing[live] - computed
        decodes = (remaining == 1) & (computed >= running.num_prompt[live])
        prompts = np.where(decodes, 0, np.minimum(remaining, limits.chunk_size))
        if limits.client_shares and running.num_clients > 1:
            self._keep_to_shares(live, decodes)
        if (num_decodes := int(np.count_nonzero(decodes))) > limits.decode_budget:
            decodes[self._out_of_turn(decodes)] = False
            num_decodes = limits.decode_budget
        room = self._prompt_room(live[decodes])
        if room is not None:
            for at in np.flatnonzero(prompts).tolist():
                prompts[at] = room.take(running.client_of(live[at]), int(prompts[at]))
        left = limits.token_budget - num_forks - num_decodes
        prompt_left = min(limits.prefill_budget, left)
        num_prompt = int(prompts.sum())
        if num_prompt > prompt_left:
            before = np.cumsum(prompts) - prompts
            prompts = np.clip(prompt_left - before, 0, prompts)
            num_prompt = prompt_left
        return (prompts + decodes).astype(np.int32), left - num_prompt, prompt_left - num_prompt, room

    def _prompt_room(self, decoding: IndexArray) -> PromptRoom | None:
        """The room for prompts beside the decodes of these rows; None: for all."""
        state = self._state
        if not state.limits.client_shares or not len(decoding):
            return None
        decode_seconds = state.decode_costs.seconds_of(len(decoding))
        return (
            None
            if decode_seconds is None
            else PromptRoom(state.prompt_shares, decode_seconds, state.running.clients_of(decoding))
        )

    def _keep_to_shares(self, live: IndexArray, decodes: npt.NDArray[np.bool_]) -> None:
        """Take those off that wait for other clients' sequences."""
        state = self._state
        if (fixed := state.decode_costs.fixed_sequences) is not None:
            at = np.flatnonzero(decodes)
            decodes[at[out_of_share(state.running.clients[live[at]], fixed, state.num_plans)]] = False

    def _out_of_turn(self, decodes: npt.NDArray[np.bool_]) -> IndexArray:
        """The decodes that have to wait when there are too many. Each step, the turn advances by the number that may run."""
        at, budget = np.flatnonzero(decodes), self._state.limits.decode_budget
        return np.roll(at, -budget * self._state.num_plans % len(at))[budget:]

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

    def _hold_back(self, live: IndexArray, num_new: Int32Array) -> None:
        """Bound the blocks that sequences with holes take, because those that they give back show only in the next step.

        Beside other sequences, a chunk takes at most half of the blocks that are left, so that no other sequence has to give
        way for blocks that come back at once. A sequence is left out if the pool cannot hold its next token beside the tokens
        that the device computes for it now. It fits in the next step, because the tokens that it keeps fit the pool.
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
        num_new[(windows > 0) & (computing >= (num_usable + num_holes) * size)] = 0
        if running.num_groups > 1:
            num_new[state.limits.num_held(computed, computing + 1) > num_usable] = 0

    def _compute_all_granted(self, live: IndexArray, num_new: Int32Array) -> None:
        """Have steps end where a grant ends, because states are kept of its last token, and of no token before it.

        Sequences that are about to be forked wait for that: behind the fork their state is another one.
        """
        running = self._state.running
        granted = running.num_reserved[live] - running.num_computed[live] - running.num_computing[live]
        np.maximum(num_new, granted, out=num_new, where=num_new > 0)
        is_first = (running.num_drawing[live] > 0) & (running.num_tokens[live] == running.num_prompt[live])
        for at in is_first.nonzero()[0].tolist():
            sequence = running.sequences[live[at]]
            if sequence is not None and not sequence.index and sequence.request.unforked:
                num_new[at] = 0

    def _plan_starts(
        self, budget: int, num_free_rows: int, promised: Counter[Request], room: PromptRoom | None, most: int
    ) -> tuple[dict[Sequence, int], list[Sequence]]:
        """The waiting sequences that may start, with the most new tokens of each, and those that may be swapped in; at most so
        many.

        A beam search starts when there are rows for all of its lists. Sequences without room for their prompts are passed over.
        """
        state = self._state
        chunk_size, headroom = state.limits.chunk_size, state.headroom
        starts: dict[Sequence, int] = {}
        swapped_in: list[Sequence] = []
        num_free_rows -= promised.total()
        passed_over: set[str] = set()
        for sequence in state.waiting.in_order(passed_over):
            if not budget or len(starts) + len(swapped_in) >= most or (num_free_rows <= 0 and not promised.total()):
                break
            request = sequence.request
            num_new = min(chunk_size, len(sequence.token_ids), budget)
            if room is not None and not promised[request] and sequence.state is not SequenceState.SWAPPED:
                num_new = room.take(request.client, num_new)
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
                budget -= starts[sequence]
            if headroom.was_refused(sequence):
                break
        return starts, swapped_in

    def promised_rows(self) -> Counter[Request]:
        """Rows reserved for lists of running searches that do not exist yet."""
        promised: Counter[Request] = Counter()
        running, loading = self._state.running, self._state.loading
        if not running.num_searching and not loading:
            return promised
        starting = (sequence for sequence in loading.values() if sequence.request.num_beams is not None)
        held = (*running.at(running.searching), *starting)
        for request, num_held in Counter(sequence.request for sequence in held).items():
            promised[request] = request.num_rows - num_held
        return promised

    def _num_new_blocks(self, rows: IndexArray, lens: Int32Array) -> int:
        return self._state.limits.num_granted(self._state.running.num_blocks[rows], lens)


def _ids(sequences: Iterable[Sequence]) -> Int64Array:
    return np.array([sequence.sequence_id for sequence in sequences], np.int64)


def _column(values: Iterable[int]) -> Int32Array:
    return np.array(list(values), np.int32)
