"""The content oracle: what every slot of a pool holds, with device work that runs late.

Owns: one content id per slot, the steps that were issued and have not run, and the ids that say what a slot must hold.
Rules: a content id stands for (tenant, whole token prefix), so a block that is wrong, stale, torn, shifted or another
tenant's never spells a sequence by accident; a block that is granted holds garbage until it is written to; a step
first copies, then reads, then writes, and the steps of one session run in order. A state is the content id of the last
token that it has seen, in the first slot of its block. Knows nothing of the cache service.
"""

from collections import deque
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field

GARBAGE = 0


class Contents:
    """Names what a slot must hold: one number for each (tenant, token prefix)."""

    def __init__(self) -> None:
        self._ids: dict[tuple[object, int], int] = {}

    def root(self, tenant: str) -> int:
        return self._ids.setdefault((tenant, -1), len(self._ids) + 1)

    def after(self, content: int, token: int) -> int:
        return self._ids.setdefault((content, token), len(self._ids) + 1)

    def spell(self, tenant: str, tokens: list[int]) -> list[int]:
        """Content ids of the slots of a sequence of these tokens."""
        content = self.root(tenant)
        return [content := self.after(content, token) for token in tokens]


@dataclass(slots=True)
class Read:
    """Attention of one sequence: the slots of its context must spell `contents` when the step runs.

    Positions of `unread` are passed over; a table entry 0 anywhere else is a fault.
    """

    label: str
    table: list[int]
    contents: list[int]
    unread: range = range(0)


@dataclass(slots=True)
class StateRead:
    """A recurrent layer of one sequence: the first slot of the block must hold the state `content` when the step runs."""

    label: str
    block: int
    content: int


@dataclass(slots=True)
class DeviceStep:
    """The device work of one step. It runs only when the engine has heard of it, which may be a while after its grant."""

    step_id: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    reads: list[Read | StateRead] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)  # slot, content
    is_known: bool = False


class ShadowMemory:
    """Slots of one pool and the device work in flight of each session."""

    def __init__(self, num_blocks: int, block_size: int, slots: MutableSequence[int] | None = None) -> None:
        self.block_size = block_size
        self._slots = slots if slots is not None else [GARBAGE] * (num_blocks * block_size)
        self._in_flight: dict[str, deque[DeviceStep]] = {}
        self.num_late_writes = 0  # writes of ended sessions that really happened: proof that the fault fired

    def slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def spoil(self, blocks: Iterable[int]) -> None:
        """These blocks were granted: what they held is garbage from now on."""
        for block in blocks:
            first = block * self.block_size
            self._slots[first : first + self.block_size] = [GARBAGE] * self.block_size

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copies at once, in order, as EXECUTOR_CACHE does."""
        self._copy(self._slots, copies)

    def write(self, slot: int, content: int) -> None:
        self._slots[slot] = content

    def issue(self, session: str, step: DeviceStep) -> None:
        self._in_flight.setdefault(session, deque()).append(step)

    def num_in_flight(self, session: str) -> int:
        return len(self._in_flight.get(session, ()))

    def written_by(self, session: str) -> set[int]:
        """Blocks that the session's steps in flight fill or write to."""
        steps = self._in_flight.get(session, ())
        filled = {destination for step in steps for _, destination in step.copies}
        return filled | {slot // self.block_size for step in steps for slot, _ in step.writes}

    def run_one(self, session: str, *, ended: bool = False) -> list[str]:
        """The oldest step of a session runs on the device. What an ended session reads is of no interest."""
        steps = self._in_flight.get(session)
        if not steps or not (steps[0].is_known or ended):
            return []
        step = steps.popleft()
        if not ended:
            return self._run(step)
        step.reads.clear()
        if step.is_known:
            self._run(step)
            self.num_late_writes += len(step.writes)
        return []

    def run_through(self, session: str, step_id: int) -> list[str]:
        """All steps of a session up to `step_id` have run when this returns."""
        faults: list[str] = []
        steps = self._in_flight.get(session)
        while steps and steps[0].step_id <= step_id:
            faults += self.run_one(session)
        return faults

    def forget(self, session: str) -> None:
        """The session's work never reaches the device any more."""
        self._in_flight.pop(session, None)

    def check(self, session: str, reads: Sequence[Read | StateRead]) -> list[str]:
        """What these sequences of one session would read if all work it has issued had run."""
        slots = self._slots
        steps = self._in_flight.get(session)
        if steps:
            slots = list(slots)
            for step in steps:
                self._copy(slots, step.copies)
                for slot, content in step.writes:
                    slots[slot] = content
        return [fault for read in reads if (fault := self._fault(slots, read))]

    def spells(self, blocks: list[int], contents: list[int]) -> bool:
        """Whether blocks hold these contents right now, before anything in flight has run: what a prefix hit relies on."""
        return not self._fault(self._slots, Read("", blocks, contents))

    def last_issued(self, session: str) -> DeviceStep:
        return self._in_flight[session][-1]

    def _run(self, step: DeviceStep) -> list[str]:
        self._copy(self._slots, step.copies)
        faults = [fault for read in step.reads if (fault := self._fault(self._slots, read))]
        for slot, content in step.writes:
            self._slots[slot] = content
        return faults

    def _copy(self, slots: MutableSequence[int], copies: list[tuple[int, int]]) -> None:
        size = self.block_size
        for source, destination in copies:
            slots[destination * size : (destination + 1) * size] = slots[source * size : (source + 1) * size]

    def _fault(self, slots: MutableSequence[int], read: Read | StateRead) -> str:
        size = self.block_size
        if isinstance(read, StateRead):
            found = slots[read.block * size] if read.block else GARBAGE
            what = "garbage" if found == GARBAGE else "another state"
            return "" if found == read.content else f"{read.label}: block {read.block} holds {what}"
        contents = read.contents
        if len(read.table) * size < len(contents):
            return f"{read.label}: {len(contents)} tokens in a table of {len(read.table)} blocks"
        held: list[int] = []
        for block in read.table[: -(-len(contents) // size)]:
            held += slots[block * size : (block + 1) * size] if block else [GARBAGE] * size
        if held[: len(contents)] == contents:
            return ""
        wrong = (i for i, content in enumerate(contents) if held[i] != content and i not in read.unread)
        position = next(wrong, None)
        if position is None:
            return ""
        block = read.table[position // size]
        what = "garbage" if held[position] == GARBAGE else "another prefix"
        return f"{read.label}: position {position} (block {block}) holds {what}"
