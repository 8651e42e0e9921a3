"""Requests and their sequences, as the scheduler sees them; the states of a sequence, and the one function that sets a state.

A request is what a client asked for; each of its continuations is a sequence: a token list that gets a block table
while it runs. Sequence 0 computes the prompt, the others are forked from it. Plain data, moved from state to state by
the scheduler alone; what only the loop needs (streams, sampling, clocks) is generation.py's.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

NO_TOKENS: Int32Array = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False

NO_SLOT = 0  # of UnreadTokens: no sequence's


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The most bytes and strings of text that one request may bring, before anything is made of them.

    Each is a setting of its own, and a refusal names the setting's flag beside the limit.
    """

    text_bytes: int = 1 << 20  # of a text, or of the contents of a chat
    constraint_bytes: int = 64 << 10  # of a schema, a pattern, or all choices together
    num_stop_strings: int = 16
    stop_bytes: int = 256  # of one stop string


@dataclass(frozen=True, slots=True)
class Retention:
    """The first and the last tokens stay readable, the blocks between come back (StreamingLLM, Xiao et al., arXiv 2309.17453).

    num_sink_tokens: 0 or more; num_window_tokens: 1 or more, the query's own included. The arithmetic is the cache service's,
    which decides: a block is given back that holds none of the first and none of the last of the committed tokens.
    """

    num_sink_tokens: int
    num_window_tokens: int

    @property
    def num_tokens(self) -> int:
        """Most tokens that a query sees."""
        return self.num_sink_tokens + self.num_window_tokens

    def num_held_blocks(self, block_size: int) -> int:
        """Most blocks that a sequence holds which grows by one token at a time."""
        return -(-self.num_sink_tokens // block_size) + (self.num_window_tokens - 1) // block_size + 2

    def holes(self, num_committed: int, block_size: int) -> range:
        """Table indices that name no block any more; empty while all are held."""
        first = -(-self.num_sink_tokens // block_size)
        return range(first, max(first, (num_committed - self.num_window_tokens) // block_size))

    def may_fork(self, num_committed: int, num_tokens: int, block_size: int) -> bool:
        """Whether the first num_tokens of so many committed ones still have their own window, so that they can be forked."""
        holes = self.holes(num_committed, block_size)
        return not holes or not holes.start * block_size < num_tokens < holes.stop * block_size + self.num_window_tokens


class FinishReason(IntEnum):
    """Why a continuation ended. The numbers are the protocol's."""

    LENGTH = 1
    STOP = 2
    END_OF_SEQUENCE = 3
    CANCELLED = 4
    ERROR = 5
    TIMED_OUT = 6
    STALLED = 7


class ReuseHint(IntEnum):
    """What a client knows of the next use of its cached KV. The numbers are the protocol's, and the cache service's."""

    UNSPECIFIED = 0
    NONE = 1
    SOON = 2


class RequestState(IntEnum):
    """Where a request is in its life. The numbers are the protocol's."""

    PENDING = 1
    RUNNING = 2
    PREEMPTED = 3
    COMPLETED = 4
    FAILED = 5
    CANCELLED = 6


class SequenceState(Enum):
    """Where a sequence is in its life."""

    UNFORKED = "unforked"  # shares its parent's tokens, until it has one of its own; known here alone
    NEW = "new"  # in the waiting queue, the cache service does not know it
    CREATING = "creating"  # in the waiting queue, the cache service is creating it
    WAITING = "waiting"  # in the waiting queue, may start
    LOADING = "loading"  # started; the cache service brings what it hits from the host tier
    RUNNING = "running"  # has a row and a block table
    LEAVING = "leaving"  # preempted; its row and its blocks go with the next step
    SWAPPED = "swapped"  # in the waiting queue, the host tier keeps its K and V
    RETURNING = "returning"  # swapped in; the cache service brings its blocks from the host tier
    ENDED = "ended"  # will never compute again


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One continuation. While it runs its tokens are in its row of RunningSequences, else in token_ids."""

    request: "Request"
    index: int  # which continuation, from 0
    token_ids: Int32Array  # prompt and output so far
    state: SequenceState
    sequence_id: int | None = None  # in the cache service; kept by a swap, else another one after each preemption
    row: int | None = None
    row_lens: Int32Array | None = None  # while it runs: tokens so far, by row
    num_computed: int = 0  # when it was preempted, until it computes again
    num_known: int = 0  # while it is swapped: tokens of which the cache service knows the ids
    parent: "Sequence | None" = None  # of an unforked one: it shares all of its token_ids but the last with that one
    had_turn: bool = False  # it ran before, or was refused a start: no later one overtakes it
    place: tuple[float, int, int] = (0.0, 0, 0)  # while it waits: rank, then arrival, then index; the smallest is first

    @property
    def num_output(self) -> int:
        """New tokens so far."""
        num_tokens = len(self.token_ids) if self.row_lens is None else int(self.row_lens[self.row])
        return num_tokens - len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """What one continuation has while no scheduler knows it: token_ids [prompt + output]."""

    index: int
    token_ids: Int32Array
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class TakenBlocks:
    """A running sequence of another session that is this one's now, under this id: its counters and its block table."""

    sequence_id: int
    num_tokens: int  # whose ids the cache service knows
    num_computed: int
    num_reserved: int
    table: Int32Array


@dataclass(slots=True, eq=False)
class Request:
    """A client's request."""

    request_id: str
    prompt: Int32Array
    max_new_tokens: int
    n: int = 1
    num_beams: int | None = None  # of a beam search, whose sequences are the lists that go on; n of them are wanted
    priority: int = 0
    tenant: str = ""
    client: str = ""  # that asked for it; clients share steps
    look_up: bool = True
    num_prompt_logprobs: int | None = None  # None: none are wanted; then the whole prompt need not be computed
    retention: Retention | None = None  # None: everything is kept
    reuse_hint: ReuseHint = ReuseHint.UNSPECIFIED
    retain_ms: int = 0  # within which its next turn is expected; 0: none is known
    cache_salt: str = ""  # nothing cached is shared between two of them
    arrival: int = 0  # place in the order of arrivals, given by Scheduler.add
    arrived_at: float = 0.0  # seconds of the engine's clock
    start_number: int = 0  # place among all engines' arrivals, given by the cache service; kept when it is preempted
    num_hit_tokens: int | None = None  # prompt tokens found cached at the first start
    num_copied_blocks: int = 0
    num_preemptions: int = 0
    slot: int = NO_SLOT  # of its unread tokens, where one sequence draws them
    sequences: SequenceOf[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        first = Sequence(self, 0, self.prompt, SequenceState.NEW)
        others = range(1, self.n if self.num_beams is None else 1)
        self.sequences = [
            first,
            *(Sequence(self, index, self.prompt, SequenceState.UNFORKED, parent=first) for index in others),
        ]

    def start_over(self, held: SequenceOf[HeldTokens]) -> None:
        """Make the sequences anew, each with what it holds. Those without a token of their own are forked from the first's
        prompt, if that has none either."""
        first: Sequence | None = None
        sequences: list[Sequence] = []
        for one in held:
            num_output = len(one.token_ids) - len(self.prompt)
            is_unforked = first is not None and not num_output
            state = SequenceState.UNFORKED if is_unforked else SequenceState.NEW
            sequence = Sequence(self, one.index, one.token_ids, SequenceState.ENDED if one.has_ended else state)
            sequence.parent = first if is_unforked else None
            if not sequences and not num_output and not one.has_ended:
                first = sequence
            sequences.append(sequence)
        self.sequences = sequences

    @property
    def max_len(self) -> int:
        """The most tokens that a sequence of the request can have."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def num_rows(self) -> int:
        """Sequences that have to run at once."""
        return self.num_beams or 1

    @property
    def num_new_tokens(self) -> int:
        return sum(sequence.num_output for sequence in self.sequences)

    @property
    def unforked(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.state is SequenceState.UNFORKED]

    @property
    def state(self) -> RequestState:
        """PENDING, RUNNING or PREEMPTED of a request that lives."""
        states = {sequence.state for sequence in self.sequences}
        if SequenceState.RUNNING in states:
            return RequestState.RUNNING
        return RequestState.PREEMPTED if self.num_preemptions else RequestState.PENDING


_S = SequenceState

# A sequence is born NEW, as the first of its request or with tokens of its own, or UNFORKED, as a continuation; of a request
# that is started over also ENDED, where it had ended before. A new session starts everything that lives again, because its
# cache service knows no sequence of the one before. ENDED is final.
TRANSITIONS: dict[tuple[SequenceState, SequenceState], str] = {
    (_S.UNFORKED, _S.RUNNING): "forked from its parent",
    (_S.UNFORKED, _S.NEW): "its parent cannot be forked: it starts alone",
    (_S.NEW, _S.RUNNING): "taken over with its blocks",
    (_S.NEW, _S.CREATING): "the cache service is creating it",
    (_S.CREATING, _S.WAITING): "the cache service knows it",
    (_S.CREATING, _S.NEW): "no slot was free, or the session is new",
    (_S.WAITING, _S.RUNNING): "started",
    (_S.WAITING, _S.LOADING): "started; its hits are in the host tier",
    (_S.WAITING, _S.NEW): "the session is new",
    (_S.LOADING, _S.RUNNING): "its hits are on the device",
    (_S.LOADING, _S.NEW): "the session is new",
    (_S.RUNNING, _S.LEAVING): "preempted",
    (_S.RUNNING, _S.NEW): "the session is new",
    (_S.LEAVING, _S.SWAPPED): "swapped out",
    (_S.LEAVING, _S.NEW): "released, or the session is new: it is computed again",
    (_S.SWAPPED, _S.RETURNING): "swapped in",
    (_S.SWAPPED, _S.NEW): "a transfer failed, or the session is new: it is computed again",
    (_S.RETURNING, _S.RUNNING): "its blocks are on the device",
    (_S.RETURNING, _S.NEW): "a transfer failed, or the session is new: it is computed again",
    **{(state, _S.ENDED): "finished, cancelled or given up" for state in _S if state is not _S.ENDED},
}


def move_to(sequence: Sequence, state: SequenceState) -> None:
    """Set a sequence's state. Nothing else does."""
    assert (sequence.state, state) in TRANSITIONS, f"{sequence.state.name} -> {state.name}"
    sequence.state = state
