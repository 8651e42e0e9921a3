"""The content oracle over two tiers: what every slot of the device and of the host tier holds, with device work that runs late.

Owns the slots of both tiers, and the steps that were issued and have not run. Rules: as in shadow_memory, a content id stands
for (tenant, whole token prefix); a step runs its orders in order, then its copies, then reads, then writes, and the steps of
one session run in order. An order that fails leaves its destination torn. Knows nothing of the cache service.
"""

from collections import deque
from dataclasses import dataclass, field

from kvkeeper.cache_service.core.values.types import TransferKind

GARBAGE = 0
PASSED = -1  # what attention passes over


@dataclass(slots=True)
class TierOrder:
    """One transfer order. fails is decided when it is issued; what is `silent` is run and never reported."""

    id: int
    kind: int
    source: int
    destination: int
    fails: bool = False
    silent: bool = False
    has_run: bool = False
    num_reports: int = 0


@dataclass(slots=True)
class TierStep:
    """Device work of one step; reads are (label, table, contents), writes (block, offset, content).

    own: (label, blocks, contents of the tenant); nothing else may be found there when the step writes (R8).
    """

    step_id: int
    orders: list[TierOrder] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    reads: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    own: list[tuple[str, list[int], set[int]]] = field(default_factory=list)
    writes: list[tuple[int, int, int]] = field(default_factory=list)


class TierMemory:
    """Blocks are lists of content ids."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.host = [[GARBAGE] * block_size for _ in range(max(num_host_blocks, 1))]
        self.in_flight: dict[str, deque[TierStep]] = {}
        self.faults: list[str] = []
        self.num_moved = 0  # blocks between the tiers
        self.num_late = 0  # steps of ended sessions that ran all the same

    def issue(self, session: str, step: TierStep) -> None:
        self.in_flight.setdefault(session, deque()).append(step)

    def run_through(self, session: str, step_id: int) -> None:
        queue = self.in_flight.get(session, deque())
        while queue and queue[0].step_id <= step_id:
            self.run(queue.popleft())

    def run_one(self, session: str) -> None:
        if self.in_flight.get(session):
            self.run(self.in_flight[session].popleft())

    def run(self, step: TierStep) -> None:
        for order in step.orders:
            self.move(order)
        for source, destination in step.copies:
            self.device[destination] = list(self.device[source]) if source else [GARBAGE] * self.block_size
        self.faults += [fault for read in step.reads if (fault := self.fault(*read))]
        for label, blocks, contents in step.own:
            foreign = {block for block in blocks if set(self.device[block]) - contents - {GARBAGE}}
            self.faults += [f"{label}: block {block} shows another tenant's content" for block in foreign]
        for block, offset, content in step.writes:
            self.device[block][offset] = content

    def move(self, order: TierOrder) -> None:
        is_out = order.kind == TransferKind.SWAP_OUT
        source, destination = (self.device, self.host) if is_out else (self.host, self.device)
        num_moved = self.block_size // 2 if order.fails else self.block_size
        tail = [GARBAGE] * (self.block_size - num_moved)
        destination[order.destination] = source[order.source][:num_moved] + tail
        order.has_run = True
        self.num_moved += not order.fails

    def fault(self, label: str, table: list[int], contents: list[int]) -> str:
        """What is wrong with reading these contents through this table now; empty when nothing is. PASSED is not read."""
        size = self.block_size
        if len(table) * size < len(contents):
            return f"{label}: {len(contents)} tokens in a table of {len(table)} blocks"
        for position, content in enumerate(contents):
            found = self.device[table[position // size]][position % size]
            if content not in (found, PASSED):
                what = "garbage" if found == GARBAGE else "another prefix"
                return f"{label}: position {position} (block {table[position // size]}) holds {what}"
        return ""
