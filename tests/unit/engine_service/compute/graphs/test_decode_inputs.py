"""A captured decode's inputs come to a device that is behind the host as they were staged, padding behind them."""

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.device.token_counts import CountedRows
from kvkeeper.engine_service.compute.graphs.decode_inputs import DecodeInputs
from tests.support.stand_ins.late_queue import LateQueue
from tests.support.worlds.batches import ScheduledRow, build_batch

BLOCK_SIZE, MOST_ROWS, WIDTH, PADDING_ROW, PADDING_SLOT = 4, 4, 3, 9, 7


def decode(first_token: int, num_rows: int) -> list[ScheduledRow]:
    """Rows that differ in all that a batch says of them."""
    return [
        ScheduledRow([first_token + row], 4 + row, np.array([first_token + 2 * row, first_token + 2 * row + 1], np.int32))
        for row in range(num_rows)
    ]


def inputs(queue: LateQueue) -> DecodeInputs:
    paddings = {"padding_row": PADDING_ROW, "padding_slot": PADDING_SLOT}
    return DecodeInputs(MOST_ROWS, WIDTH, torch.device("cpu"), queue, pin_memory=False, **paddings)


def test_a_step_that_is_staged_before_the_one_before_was_copied_leaves_that_alone() -> None:
    queue = LateQueue()
    steps, found = inputs(queue), []
    for place, num_rows in enumerate((3, 2, 4, 1)):
        copy = steps.stage(build_batch(decode(20 + 10 * place, num_rows), BLOCK_SIZE), MOST_ROWS)

        def run(copy=copy, num_rows=num_rows):
            copy()
            tensors = steps.tensors(MOST_ROWS)
            names = ("token_ids", "positions", "slot_mapping", "decode_lens", "rows")
            found.append([tensors[name].tolist() for name in names] + [tensors["decode_tables"][:num_rows, :2].tolist()])

        queue.submit(run)
        if place:
            queue.run_up_to(place)  # the step before is read
    queue.run_up_to(4)
    for place, (num_rows, told) in enumerate(zip((3, 2, 4, 1), found, strict=True)):
        first, padding = 20 + 10 * place, MOST_ROWS - num_rows
        rows = range(num_rows)
        assert told == [
            [*(first + row for row in rows), *[0] * padding],
            [*(4 + row for row in rows), *[0] * padding],
            [*((first + 2 * row + 1) * BLOCK_SIZE + row for row in rows), *[-1] * padding],
            [*(5 + row for row in rows), *[0] * padding],
            [PADDING_ROW] * MOST_ROWS,
            [[first + 2 * row, first + 2 * row + 1] for row in rows],
        ]


def test_a_third_step_that_nobody_has_copied_is_refused() -> None:
    steps = inputs(LateQueue())
    for _ in range(2):
        steps.stage(build_batch(decode(20, 1), BLOCK_SIZE), 1)
    with pytest.raises(AssertionError, match="two steps"):
        steps.stage(build_batch(decode(20, 1), BLOCK_SIZE), 1)


def test_rows_that_are_not_penalised_count_nothing_and_have_no_penalties() -> None:
    steps = inputs(LateQueue())
    slots, _, addends, penalties = steps.counting(torch.zeros(MOST_ROWS, dtype=torch.int64))
    assert (slots.tolist(), addends.tolist()) == ([PADDING_SLOT] * MOST_ROWS, [0] * MOST_ROWS)
    assert penalties.tolist() == [[1.0] * MOST_ROWS, [0.0] * MOST_ROWS, [0.0] * MOST_ROWS]
    columns = np.array([[1.5, 2.0], [0.5, 0.0], [0.25, 0.0]], np.float32)
    for where, num_rows in (([0, 2], 3), ([1], 2)):
        count = len(where)
        none = np.full(count, -1)
        counted = CountedRows(np.array(where), np.arange(3, 3 + count), np.full(count, 2), none, none, columns[:, :count])
        steps.stage(build_batch(decode(20, num_rows), BLOCK_SIZE), MOST_ROWS, None, counted)()
        assert slots[where].tolist() == [3, 4][:count]
        assert addends[where].tolist() == [2] * count
        assert penalties[:, where].tolist() == columns[:, :count].tolist()
        others = [row for row in range(MOST_ROWS) if row not in where]
        assert slots[others].tolist() == [PADDING_SLOT] * len(others)
        assert addends[others].tolist() == [0] * len(others)
        assert penalties.T[others].tolist() == [[1.0, 0.0, 0.0]] * len(others)
