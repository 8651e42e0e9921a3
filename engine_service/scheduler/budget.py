"""Budget: how the running rows share the tokens that a step may compute, and what is left of them for starts.

Decodes come before prompts, and prompts in the order of their rows. Where clients share steps, the many sequences of one wait
for the few of another (client_shares.py). Where more decode than a step may, they take turns. Pure.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..values.request import Int32Array
from ..values.step_wait import StepWait
from .client_shares import PromptRoom, out_of_share
from .running import IndexArray
from .scheduler_state import SchedulerState


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
    if wants_room and (decode_seconds := state.decode_costs.seconds_of(num_decodes)) is not None:
        budget.room = PromptRoom(state.prompt_shares, decode_seconds, running.clients_of(live[decodes]))
    num_new = decodes.astype(np.int32)
    if prompts is not None:
        num_new += _share_prompts(state, live, prompts, budget)
    return num_new, budget


def _share_prompts(state: SchedulerState, live: IndexArray, prompts: Int32Array, budget: Budget) -> Int32Array:
    """What the budget has for these prompt tokens of each row; takes it from there."""
    if budget.room is not None:
        for at in np.flatnonzero(prompts).tolist():
            prompts[at] = budget.take_room(state.running.client_of(live[at]), int(prompts[at]))
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
