"""Block copies and transfers that the core asks an executor to run."""

from dataclasses import dataclass, field

from .types import NO_INT32, Int32Array


@dataclass(frozen=True, slots=True)
class Copies:
    """Transfers, then block copies, to be run in order, before any write that the same call allows."""

    sources: Int32Array
    destinations: Int32Array
    transfer_kinds: Int32Array = field(default_factory=lambda: NO_INT32)
    transfer_sources: Int32Array = field(default_factory=lambda: NO_INT32)
    transfer_destinations: Int32Array = field(default_factory=lambda: NO_INT32)

    def __len__(self) -> int:
        """Blocks to be copied."""
        return len(self.sources) + len(self.transfer_kinds)
