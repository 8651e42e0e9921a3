"""Transfers and copies on write beside the forward pass: in the order that their blocks need, and one wait of the host a step.

The forward pass of the runner here reads and writes blocks of bytes; the device does nothing until the host waits for it, and
copies as late as they may come, or as early.
"""

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.device.device_queue import HostQueue, Moves
from kvkeeper.engine_service.compute.step_compute import StepCompute, StepRows
from kvkeeper.engine_service.ranks.block_copies import SWAP_OUT, BlockMover, copies_for
from kvkeeper.engine_service.scheduler.plan import StepChanges, Work
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.kernels.copy_blocks import copy_blocks
from kvkeeper.kernels.layout import KvLayout
from tests.support.stand_ins.late_queue import LateQueue

SWAP_IN, BLOCK_SIZE, NUM_BLOCKS = 2, 2, 12
QUEUES = {"late": LateQueue, "early": lambda: LateQueue(eager_copies=True), "host": HostQueue}


@pytest.fixture(params=QUEUES)
def queue(request):
    return QUEUES[request.param]()


class BytesRunner:
    """A forward pass writes the sum of all blocks of a row's table, and one more, to the block of its slot."""

    layout = KvLayout(1, 1, 2, torch.float16, BLOCK_SIZE)
    vocab_size = 4

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def forward(self, batch: Batch) -> torch.Tensor:
        for table, slot in zip(batch.block_tables.tolist(), batch.slot_mapping.tolist(), strict=True):
            self.blocks[slot // BLOCK_SIZE] = self.blocks[table].sum(0, dtype=torch.uint8) + 1
        return torch.zeros(0, self.vocab_size)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        copy_blocks(self.blocks, pairs)

    def synchronize(self) -> None: ...


class Halves:
    """A Packing: the host keeps half of a block, whose bytes are all the same."""

    block_bytes = 2

    def pack(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks[:, :2].clone()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.repeat(1, 2)


class World:
    def __init__(self, queue, packing: Halves | None = None) -> None:
        self.device = torch.arange(1, NUM_BLOCKS + 1, dtype=torch.uint8)[:, None].repeat(1, 4)
        host_bytes = 4 if packing is None else packing.block_bytes
        self.host = torch.arange(101, 101 + NUM_BLOCKS, dtype=torch.uint8)[:, None].repeat(1, host_bytes)
        self.copies = copies_for(packing, self.device.device, self.host)
        self.compute, self.queue = StepCompute(BytesRunner(self.device), queue), queue
        self.order: list[str] = []

    def launch(self, rows=(), copies=(), orders=()):
        """rows: (table, block that is written); orders: (kind, source, destination)."""
        columns = np.array(orders, np.int64).reshape(-1, 3).T
        mover, is_out = BlockMover(self.device, self.host, self.copies), columns[0] == SWAP_OUT

        def run():
            self.order.append("moves")
            assert mover.move([(at, *order) for at, order in enumerate(orders)])[1] == []

        moves = Moves(run, columns[1][is_out], columns[2][~is_out]) if orders else None
        return self.compute.launch(work_of(rows, list(copies)), StepRows([], []), moves)

    def bytes(self):
        return self.device[:, 0].tolist(), self.host[:, 0].tolist()


def work_of(rows, copies):
    none, flags = np.empty(0, np.int64), np.empty(0, np.bool_)
    batch = None
    if rows:
        count, width = len(rows), max(len(table) for table, _ in rows)
        batch = Batch(
            token_ids=np.zeros(count, np.int64),
            positions=np.zeros(count, np.int64),
            slot_mapping=np.array([block * BLOCK_SIZE for _, block in rows]),
            query_start_loc=np.arange(count + 1, dtype=np.int32),
            seq_lens=np.ones(count, np.int32),
            block_tables=np.array([list(table) + [0] * (width - len(table)) for table, _ in rows], np.int32),
            logit_rows=none,
            logit_start_loc=np.zeros(count + 1, np.int32),
        )
    changes, ints = StepChanges((), (), (), ()), np.empty(0, np.int32)
    return Work(none, ints, none, 0, copies, batch, none, flags, [], [], none, [], none, (), [], none, [], ints, changes)


STEPS = {
    "what the step before wrote is swapped out": [
        {"rows": [((1, 2), 3)]},
        {"rows": [((1,), 4)], "orders": [(SWAP_OUT, 3, 5)]},
    ],
    "what the step before reads is swapped over": [
        {"rows": [((1, 2), 3)]},
        {"rows": [((3,), 4)], "orders": [(SWAP_IN, 5, 1), (SWAP_IN, 6, 2)]},
    ],
    "a step writes what it swaps out": [{"rows": [((1,), 3)], "orders": [(SWAP_OUT, 3, 5)]}],
    "a step reads what it swaps in": [{"rows": [((1, 2), 3)], "orders": [(SWAP_IN, 5, 2)]}],
    "a copy overwrites what is swapped out": [{"copies": [(1, 3)], "orders": [(SWAP_OUT, 3, 5)]}],
    "a copy reads what is swapped in": [{"copies": [(3, 4)], "orders": [(SWAP_IN, 5, 3)]}],
    "a copy is read by the step": [{"rows": [((4,), 5)], "copies": [(1, 4)]}],
    "a copy waits for what the step before wrote": [{"rows": [((1, 2), 3)]}, {"rows": [((4,), 4)], "copies": [(3, 4)]}],
    "a copy waits for what the step before reads": [{"rows": [((3, 4), 5)]}, {"rows": [((5,), 6)], "copies": [(1, 4)]}],
    "what was swapped in is read by the step behind": [{"orders": [(SWAP_IN, 5, 3)]}, {"rows": [((3,), 4)]}],
    "what was swapped out is overwritten by the step behind": [
        {"rows": [((1,), 2)], "orders": [(SWAP_OUT, 3, 5)]},
        {"rows": [((1,), 3)]},
    ],
    "out, over and in again": [{"orders": [(SWAP_OUT, 3, 5), (SWAP_IN, 6, 3), (SWAP_IN, 5, 4)], "rows": [((3, 4), 7)]}],
    "all at once": [
        {"rows": [((1, 2), 3), ((2,), 4)], "copies": [(1, 5), (5, 6)]},
        {"rows": [((5, 6), 7)], "copies": [(3, 8)], "orders": [(SWAP_OUT, 4, 1), (SWAP_IN, 2, 9)]},
        {"rows": [((9, 7), 4)], "orders": [(SWAP_OUT, 9, 3), (SWAP_IN, 1, 10)]},
    ],
}


@pytest.mark.parametrize("packing", [None, Halves()], ids=["as they are", "packed"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_bytes_are_those_of_a_device_that_does_one_thing_after_the_other(steps, queue, packing):
    expected, world = World(HostQueue()), World(queue, packing)
    flights = []
    for step in steps:
        orders, copies = step.get("orders", ()), step.get("copies", ())
        for order in orders:
            assert expected.launch(orders=[order]).read() is not None
        assert expected.launch(copies=copies).read() is not None
        assert expected.launch(step.get("rows", ())).read() is not None
        flights.append(world.launch(**step))
        if len(flights) == 2:  # one step runs ahead
            assert flights.pop(0).read() is not None
    for flight in flights:
        assert flight.read() is not None
    assert world.bytes() == expected.bytes()


def test_the_host_waits_once_a_step():
    world, before = World(queue := LateQueue()), None
    for at in range(6):
        flight = world.launch([((1, 2), 3)], [(4, 5)], [(SWAP_OUT, 6, at), (SWAP_IN, 9, 7)])
        if before is not None:
            before.read()
        assert queue.num_blocked == at
        before = flight
    before.read()
    assert queue.num_blocked == 6


def test_the_forward_pass_does_not_wait_for_transfers_of_other_blocks_and_the_read_does():
    world = World(LateQueue())
    forward = world.compute._runner.forward
    world.compute._runner.forward = lambda batch: (world.order.append("forward"), forward(batch))[1]
    world.launch([((1,), 2)], orders=[(SWAP_OUT, 3, 5)]).read()
    assert world.order == ["forward", "moves"]
    world.order.clear()
    world.launch([((1,), 2)], orders=[(SWAP_OUT, 2, 5)]).read()
    assert world.order == ["moves", "forward"]
    world.order.clear()
    step = world.launch([((1,), 2)], orders=[(SWAP_IN, 5, 1)])
    step.read()
    assert world.order == ["moves", "forward"]


def test_blocks_of_other_groups_count_as_touched():
    work = work_of([((1,), 2)], [])
    batch = work.batch
    grouped = Batch(
        **{name: getattr(batch, name) for name in Batch.__dataclass_fields__ if not name.startswith("group")},
        group_tables=np.array([[[3]]], np.int32),
        group_slots=np.array([[4 * BLOCK_SIZE]]),
    )
    work = Work(**{name: getattr(work, name) for name in Work.__dataclass_fields__ if name != "batch"}, batch=grouped)
    ids = np.array
    for read, written, touches in (([3], [], False), ([4], [], True), ([], [3], True), ([], [5], False), ([2], [], True)):
        moves = Moves(lambda: None, ids(read, np.int64), ids(written, np.int64))
        assert moves.touch(work, BLOCK_SIZE) == touches, (read, written)


def test_transfers_that_break_are_raised_with_the_read(queue, capfd):
    world = World(queue)

    def run():
        raise MemoryError("no pinned memory")

    moves = Moves(run, np.empty(0, np.int64), np.empty(0, np.int64))
    step = world.compute.launch(work_of([((1,), 2)], []), StepRows([], []), moves)
    with pytest.raises(MemoryError):
        step.read()


def test_transfers_are_made_also_where_the_forward_pass_cannot_be_prepared(queue, monkeypatch, capfd):
    """They are of other sequences, which would wait for ever for orders that are never answered."""
    world = World(queue)

    def raises(*args):
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(world.compute, "_stage", raises)
    assert world.launch([((1,), 2)], orders=[(SWAP_OUT, 3, 5)]).read() is None
    assert (world.order, world.bytes()[1][5]) == (["moves"], 4)
    assert "no pinned memory" in "".join(capfd.readouterr())


def test_transfers_of_which_nobody_knows_whether_they_were_made_are_raised_with_the_read(queue, monkeypatch, capfd):
    world = World(queue)

    def raises(*args):
        raise RuntimeError("no event")

    monkeypatch.setattr(queue.copies, "follow", raises)
    with pytest.raises(RuntimeError, match="no event"):
        world.launch([((1,), 2)], orders=[(SWAP_OUT, 3, 5)]).read()
    assert world.launch([((1,), 2)]).read() is not None
