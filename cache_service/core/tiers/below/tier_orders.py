"""What a tier asked by name is told to do, and how it is used: values alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...values.copies import Content, TierOrder
from ...values.types import Int32Array


class TierRules(NamedTuple):
    """How a tier is used. on_second_use: only blocks that were loaded back from the host tier are stored.

    weighs: loads that take longer than computing are not ordered, see worth.py. tenants: whose blocks are stored, if not all.
    """

    on_second_use: bool = False
    deadline: float = 2.0  # seconds that a sequence waits for its load
    most_loading: int = 4096  # blocks in flight towards the host tier
    most_asked: int = 0  # blocks of a prompt that a question is about; 0 where the table knows what is stored
    name: str = "disk"  # in the names of counts
    weighs: bool = False
    tenants: frozenset[str] | None = None


class Table(Protocol):
    """What a tier has by name, as far as it is known here: see SlotTable and ToldTable."""

    num_slots: int
    last_number: int  # of a store of an earlier run

    @property
    def may_have_some(self) -> bool: ...

    def find(self, name: bytes) -> int | None: ...

    def knows(self, name: bytes) -> bool: ...

    def names(self) -> set[bytes]: ...

    def learn(self, contents: Iterable[Content], lost: Iterable[bytes] = ()) -> None: ...

    def use(self, name: bytes) -> bool: ...

    def begin_store(self, name: bytes) -> int | None: ...

    def end_store(self, order: TierOrder, *, is_stored: bool) -> None: ...

    def begin_read(self, order: TierOrder) -> None: ...

    def end_read(self, order: TierOrder, *, is_lost: bool) -> None: ...

    def clear(self) -> None: ...

    def stats(self) -> dict[str, int]: ...

    def check(self, reads: Sequence[TierOrder], stores: Sequence[TierOrder]) -> list[str]: ...


@dataclass(slots=True, eq=False)
class Question:
    """Which of these names, each the child of the one before, are stored: so many of the first as all are.

    slot: of the sequence that waits. tokens: of its prompt up to the end of the last name. With several groups of layers a name
    is that of one block, and `asked` has those of which it is known whether they are stored, after num_turns questions.
    """

    slot: int
    root: int
    tokens: Int32Array
    first: int
    names: list[bytes]
    era: int
    asked_at: float
    deadline: float
    is_trial: bool = False  # what is found is loaded even if that does not pay
    is_in_flight: bool = True
    is_cancelled: bool = False  # too late to be worth an answer
    asked: frozenset[bytes] = frozenset()
    num_turns: int = 1


@dataclass(slots=True, eq=False)
class Load:
    """A part of a prompt on its way to the host tier.

    tokens: of the prompt up to the end of the load. first: index of its first block. held: host blocks of the blocks before it.
    wanted_at: since when a sequence has waited for it. num_entries: of a table, that it makes a hit longer.
    """

    root: int
    tokens: Int32Array
    first: int
    orders: list[TierOrder]
    held: Int32Array
    wanted_at: float
    deadline: float
    num_entries: int
    is_in_flight: bool = True


@dataclass(slots=True, eq=False)
class Store:
    """Blocks on their way from the host tier."""

    orders: list[TierOrder]
    deadline: float


@dataclass(slots=True)
class TierCounts:
    """Sums over the life of the tier, in blocks but for loads."""

    num_loads: int = 0
    num_late_loads: int = 0
    num_hit_blocks: int = 0
    num_stored_blocks: int = 0
    num_damaged_blocks: int = 0
    num_failed_blocks: int = 0
