"""The arguments of a sequence, which a client fixes when it creates it."""

from dataclasses import dataclass

from .types import Int32Array, ReuseHint, SequenceId


@dataclass(frozen=True, slots=True)
class Retention:
    """The first num_sink_tokens and the last num_window_tokens committed tokens stay readable (sequences/spans.py)."""

    num_sink_tokens: int
    num_window_tokens: int

    def num_held_blocks(self, block_size: int) -> int:
        """Most blocks that a sequence with this retention holds while it grows by one token at a time."""
        return -(-self.num_sink_tokens // block_size) + (self.num_window_tokens - 1) // block_size + 2


@dataclass(frozen=True, slots=True)
class SequenceArgs:
    """What CreateSequence says of a sequence. Priority, retention and hint may change later (calls/update.py)."""

    sequence_id: SequenceId
    token_ids: Int32Array
    max_tokens: int = 0  # 0: the pool's limit
    scope: str = ""  # of its prefix tree, see scopes.py
    priority: int = 0
    retention: Retention | None = None
    start_number: int = 0  # 0: the next one
    reuse_hint: ReuseHint = ReuseHint.UNSPECIFIED
    retain_seconds: float = 0.0  # that SOON is at least, see reuse_order.py; 0: what the hint says
