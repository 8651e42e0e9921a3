"""SchedulerState: the state that the scheduler's parts share, and small questions about it that several parts ask.

Owns running rows, waiting, entering, loading and unforked sequences, the pool's limits, what is known of its blocks, the costs
of preemption, and the counters. Each part changes what its own verbs are about. Pure.
"""

from ..values.request import Int32Array, Sequence, TakenBlocks
from .client_shares import DecodeCosts, PromptShares
from .headroom import Costs, Headroom
from .limits import Limits
from .running import RunningSequences
from .waiting import WaitingSequences


class SchedulerState:
    """All that one engine's scheduler knows. A new session replaces limits, rows and headroom, so no part keeps them."""

    def __init__(self, limits: Limits, waiting: WaitingSequences | None = None, *, runs_ahead: bool = True) -> None:
        """
        Args:
            waiting: by default in order of arrival, without regard to tenants.
            runs_ahead: whether a step may be started before the tokens of the one before are known.
        """
        self.runs_ahead = runs_ahead
        self.waiting = waiting or WaitingSequences()
        self.loading: dict[int, Sequence] = {}  # by sequence id; each is to get a row
        self.unforked: dict[Sequence, None] = {}  # with a token of their own behind what their parents have committed
        self.entering: dict[Sequence, TakenBlocks] = {}  # with blocks that another session had; each is to get a row
        self.costs = Costs()
        self.decode_costs = DecodeCosts()
        self.prompt_shares = PromptShares()
        self.num_arrivals = self.num_preemptions = self.num_swapped_out = 0
        self.num_plans = 0  # that have been applied
        self.loads_have_failed = False  # since the last plan was made
        self.start_session(limits)

    def start_session(self, limits: Limits) -> None:
        """Nothing runs, and nothing is known of the pool but its limits."""
        self.limits = limits
        num_rows = min(limits.max_running, limits.token_budget)  # a running sequence computes a token a step
        most = max(limits.max_len, limits.max_retained_len)
        self.running = RunningSequences(num_rows, most, limits.block_size, limits.num_groups)
        self.headroom = Headroom()

    def get_tokens(self, sequence: Sequence) -> Int32Array:
        """Prompt and output so far; a view, valid until the sequence gets another token."""
        if sequence.row is None:
            return sequence.token_ids
        return self.running.tokens[sequence.row, : self.running.num_tokens[sequence.row]]

    def rests(self, sequence: Sequence) -> bool:
        """Whether the sequence is a list of a beam search that is computed to its last token and waits for the other lists."""
        row, running = sequence.row, self.running
        return row is not None and bool(running.searches[row] and running.num_computed[row] == running.num_tokens[row])

    def resting(self) -> list[Sequence]:
        """Lists that wait for other lists of their search, the most important first."""
        running = self.running
        return [sequence for sequence in running.at(running.searching) if self.rests(sequence)] if running.num_searching else []
