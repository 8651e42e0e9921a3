"""Planning: which tokens of which sequences the next step computes.

Running sequences come before starts, which come in the order of the policy in force (policies.py); headroom.py has the rules
for when blocks are short. While a step is computed the next one is planned, counting on the tokens that will come. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..values.request import Int32Array, Request, Sequence, SequenceState
from .plan import Int64Array, Limits, Plan
from .state.headroom import Headroom
from .state.preemption_cost import Costs
from .state.running import IndexArray, RunningSequences
from .state.waiting import WaitingSequences

NO_GUESSES: Mapping[int, Int32Array] = MappingProxyType({})


class Planning:
    """See the module; a part of the scheduler."""

    def __init__(self, limits: Limits, waiting: WaitingSequences | None = None) -> None:
        """waiting: those of no tenant in particular, by arrival, by default."""
        self.limits = limits
        self.running = make_rows(limits)
        self.waiting = waiting or WaitingSequences()
        self.loading: dict[int, Sequence] = {}  # by sequence id; each has a row to come
        self._unforked: dict[Sequence, None] = {}  # those with a token of their own, behind what their parents have committed
        self._num_arrivals = 0
        self.num_preemptions = self.num_swapped_out = 0
        self.num_plans = 0  # that were answered
        self._loads_have_failed = False  # some, since the last plan was made
        self.costs = Costs()
        self.room = Headroom()

    def schedule(self, now: float, guesses: Mapping[int, Int32Array] = NO_GUESSES) -> Plan:
        """Plan a step; changes nothing but the next id and, with the load, the order of the waiting.

        now: seconds of the clock that add is told.
        guesses: by row of a sequence that decodes, tokens that may follow; as many are checked as the budget has room for.
        """
        running = self.running
        self._loads_have_failed = False
        order = running.order
        commit_rows = order[running.num_computed[order] > running.num_committed[order]]
        first_new, num_tokens = running.num_known[commit_rows], running.num_tokens[commit_rows]
        live = running.live
        num_free_rows = running.num_rows - len(live) - len(self.loading)
        self.waiting.now = max(now, self.waiting.now)
        self.waiting.measure(min(self.limits.prefill_budget, self.limits.token_budget))
        promised = self._promised_rows()
        num_resting = self._num_resting()
        live = live[running.num_left[live] > running.num_drawing[live]]
        forks = self._plan_forks(num_free_rows - promised.total())
        fork_lens = _column(len(child.token_ids) - 1 for child in forks)
        fork_children = np.array([self.waiting.draw_id() for _ in forks], np.int64)
        num_new, budget, prompt_budget = self._share_budget(live, len(forks))
        if running.num_retaining:
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
        if (len(running.live) == num_resting and not self.loading) or self.room.allows_starts(num_growing):
            starts, swapped_in = self._plan_starts(min(budget, prompt_budget), num_free_rows - len(forks), promised)
        start_lens = _column(len(sequence.token_ids) for sequence in starts)
        ended_rows = order[running.ended[order]]
        swap_rows = ended_rows[running.swapping[ended_rows]]
        if len(swap_rows):
            ended_rows = ended_rows[~running.swapping[ended_rows]]
        return Plan(
            commit_ids=running.sequence_ids[commit_rows],
            commit_lens=running.num_computed[commit_rows],
            commit_num_new=num_tokens - first_new,
            commit_tokens=running.gather_tokens(commit_rows, first_new, num_tokens - first_new),
            fork_parents=_ids(child.parent for child in forks if child.parent is not None),
            fork_children=fork_children,
            fork_lens=fork_lens,
            release_ids=np.concatenate((running.sequence_ids[ended_rows], np.array(self.waiting.releases, np.int64))),
            swap_out_ids=running.sequence_ids[swap_rows],
            swap_in_ids=_ids(swapped_in),
            start_ids=_ids(starts),
            start_max_new=_column(starts.values()),
            # One token is left to compute, also where stored logits could follow the whole prompt: the sampler wants a pass.
            start_max_hit=(start_lens - 1) * _column(sequence.request.look_up for sequence in starts),
            # Whoever is computing the same prefix now shares it when it has, which costs less than computing it twice.
            start_may_wait=_column(sequence.request.look_up for sequence in starts),
            reserve_ids=np.concatenate((running.sequence_ids[reserve_rows], fork_children)),
            reserve_min=np.concatenate((computed + 1, fork_lens + 1)),
            reserve_max=np.concatenate((computed + num_new, fork_lens + 1)),
            guesses=guesses,
            commit_rows=commit_rows,
            forked=tuple(forks),
            released=tuple(self.running.at(ended_rows)),
            swapped_out=tuple(self.running.at(swap_rows)),
            swapped_in=tuple(swapped_in),
            started=tuple(starts),
            reserve_rows=reserve_rows,
        )

    def _share_budget(self, live: IndexArray, num_forks: int) -> tuple[Int32Array, int, int]:
        """Tokens to compute for each live row, decodes before prompts; what is left beside the forks, and of it for prompts."""
        limits, running = self.limits, self.running
        computed = running.num_computed[live] + running.num_computing[live]
        remaining = running.num_tokens[live] + running.num_drawing[live] - computed
        decodes = (remaining == 1) & (computed >= running.num_prompt[live])
        prompts = np.where(decodes, 0, np.minimum(remaining, limits.chunk_size))
        if (num_decodes := int(np.count_nonzero(decodes))) > limits.decode_budget:
            decodes[self._out_of_turn(decodes)] = False
            num_decodes = limits.decode_budget
        left = limits.token_budget - num_forks - num_decodes
        prompt_left = min(limits.prefill_budget, left)
        num_prompt = int(prompts.sum())
        if num_prompt > prompt_left:
            before = np.cumsum(prompts) - prompts
            prompts = np.clip(prompt_left - before, 0, prompts)
            num_prompt = prompt_left
        return (prompts + decodes).astype(np.int32), left - num_prompt, prompt_left - num_prompt

    def _out_of_turn(self, decodes: npt.NDArray[np.bool_]) -> IndexArray:
        """Of more decodes than may be, those that have to wait: with every step the turn goes on by as many as may."""
        at, budget = np.flatnonzero(decodes), self.limits.decode_budget
        return np.roll(at, -budget * self.num_plans % len(at))[budget:]

    def _fit_guesses(
        self, guesses: Mapping[int, Int32Array], rows: IndexArray, num_new: Int32Array, budget: int
    ) -> tuple[dict[int, Int32Array], Int32Array]:
        """Of guesses for rows that compute their last token, those that the budget and the requests have room for."""
        fitting: dict[int, Int32Array] = {}
        num_guessed = np.zeros_like(num_new)
        is_last = self.running.num_computed[rows] + num_new == self.running.num_tokens[rows]
        for at in np.flatnonzero(is_last).tolist():
            row = int(rows[at])
            sequence = self.running.sequences[row]
            if row in guesses and sequence is not None:
                room = min(budget, sequence.request.max_new_tokens - sequence.num_output - 1)
                if (kept := guesses[row][: max(room, 0)]).size:
                    fitting[row], num_guessed[at] = kept, len(kept)
                    budget -= len(kept)
        return fitting, num_guessed

    def _plan_forks(self, num_free_rows: int) -> list[Sequence]:
        """Those with a token of their own, as far as there are rows and slots for them; lists of a search have their rows."""
        if not self._unforked:
            return []
        forks: list[Sequence] = []
        for child in self._unforked:
            if len(forks) >= self.limits.max_known_sequences - self.waiting.num_known:
                break
            if not self._may_fork(child, self.running.num_computed):
                continue
            if child.request.num_beams is None:
                if num_free_rows <= 0:
                    continue
                num_free_rows -= 1
            forks.append(child)
        return forks

    def _may_fork(self, child: Sequence, committed: Int32Array) -> bool:
        """Whether its parent, with so many tokens committed by row, still has all that a fork of them would read."""
        retention = child.request.retention
        if retention is None or child.parent is None:
            return True
        return retention.may_fork(int(committed[child.parent.row]), len(child.token_ids) - 1, self.limits.block_size)

    def _hold_back(self, live: IndexArray, num_new: Int32Array) -> None:
        """Bound what sequences with retention take before they give anything back for it, which the next step is told of.

        Beside others no chunk takes more than half of the blocks that are left, so that none of the others has to give way to
        blocks that come back at once. A sequence whose next token the pool cannot hold beside what the device computes for it
        now is left out: with the next step there is room, because what it keeps fits the pool.
        """
        running, size = self.running, self.limits.block_size
        windows, computed = running.num_window[live], running.num_computed[live]
        computing = computed + running.num_computing[live]
        if len(live) > 1:
            most = running.num_blocks[live] * size - computing + self.room.most_at_once * size
            np.minimum(num_new, np.maximum(most, 1), out=num_new, where=windows > 0)
        num_holes = np.maximum((computed - windows) // size + -running.num_sink[live] // size, 0)
        num_new[(windows > 0) & (computing >= (self.limits.num_usable_blocks + num_holes) * size)] = 0

    def _plan_starts(
        self, budget: int, num_free_rows: int, promised: Counter[Request]
    ) -> tuple[dict[Sequence, int], list[Sequence]]:
        """Who of the waiting may start, with most new tokens, and who may be swapped in.

        A search starts when there are rows for all of its lists.
        """
        starts: dict[Sequence, int] = {}
        swapped_in: list[Sequence] = []
        num_free_rows -= promised.total()
        for sequence in self.waiting.in_order():
            if not budget or (num_free_rows <= 0 and not promised.total()):
                break
            request = sequence.request
            if promised[request]:
                promised[request] -= 1
            elif num_free_rows >= request.num_rows:
                num_free_rows -= request.num_rows
                promised[request] += request.num_rows - 1
            else:
                num_free_rows = 0  # nobody behind it takes the rows that it waits for
                continue
            if sequence.state is SequenceState.SWAPPED:
                swapped_in.append(sequence)
            else:
                starts[sequence] = min(self.limits.chunk_size, len(sequence.token_ids), budget)
                budget -= starts[sequence]
            if self.room.was_refused(sequence):
                break
        return starts, swapped_in

    def _promised_rows(self) -> Counter[Request]:
        """Rows that the lists of searches under way have not taken yet."""
        promised: Counter[Request] = Counter()
        if not self.running.num_searching and not self.loading:
            return promised
        loading = (sequence for sequence in self.loading.values() if sequence.request.num_beams is not None)
        held = (*self.running.at(self.running.searching), *loading)
        for request, num_held in Counter(sequence.request for sequence in held).items():
            promised[request] = request.num_rows - num_held
        return promised

    def _rests(self, sequence: Sequence) -> bool:
        """It is a list of a search, computed to its last token, that waits for the others."""
        row, running = sequence.row, self.running
        return row is not None and bool(running.searches[row] and running.num_computed[row] == running.num_tokens[row])

    def _num_resting(self) -> int:
        return sum(map(self._rests, self.running.at(self.running.searching))) if self.running.num_searching else 0

    def _num_new_blocks(self, rows: IndexArray, lens: Int32Array) -> int:
        needed = -(-lens // self.limits.block_size) - self.running.num_blocks[rows]
        return int(np.maximum(needed, 0).sum())


def make_rows(limits: Limits) -> RunningSequences:
    num_rows = min(limits.max_running, limits.token_budget)  # whoever runs computes a token a step
    return RunningSequences(num_rows, max(limits.max_len, limits.max_retained_len), limits.block_size)


def _ids(sequences: Iterable[Sequence]) -> Int64Array:
    return np.array([sequence.sequence_id for sequence in sequences], np.int64)


def _column(values: Iterable[int]) -> Int32Array:
    return np.array(list(values), np.int32)
