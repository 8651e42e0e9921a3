"""A captured step's inputs come to a device that is behind the host as they were staged, padding behind them."""

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.device.token_counts import CountedRows
from kvkeeper.engine_service.compute.graphs.step_inputs import InputsShape, StepInputs
from kvkeeper.engine_service.compute.graphs.step_sizes import StepSize
from tests.support.stand_ins.late_queue import LateQueue
from tests.support.worlds.batches import ScheduledRow, build_batch

BLOCK_SIZE, MOST_ROWS, WIDTH, PADDING_ROW, PADDING_SLOT = 4, 4, 3, 9, 7


DECODES = StepSize(MOST_ROWS, 0, 0, MOST_ROWS)
BESIDE_PROMPTS = StepSize(2, 8, 2, MOST_ROWS)


def decode(first_token: int, num_rows: int) -> list[ScheduledRow]:
    """Rows that differ in all that a batch says of them."""
    return [
        ScheduledRow([first_token + row], 4 + row, np.array([first_token + 2 * row, first_token + 2 * row + 1], np.int32))
        for row in range(num_rows)
    ]


def inputs(queue: LateQueue) -> StepInputs:
    paddings = {"padding_row": PADDING_ROW, "padding_slot": PADDING_SLOT}
    shape = InputsShape(MOST_ROWS + 8, MOST_ROWS, MOST_ROWS, 2, 1, WIDTH, WIDTH)
    return StepInputs(shape, torch.device("cpu"), queue, pin_memory=False, **paddings)


def test_a_step_that_is_staged_before_the_one_before_was_copied_leaves_that_alone() -> None:
    queue = LateQueue()
    steps, found = inputs(queue), []
    for place, num_rows in enumerate((3, 2, 4, 1)):
        copy = steps.stage(build_batch(decode(20 + 10 * place, num_rows), BLOCK_SIZE), num_rows, DECODES)

        def run(copy=copy, num_rows=num_rows):
            copy()
            tensors = steps.tensors(DECODES)
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


def test_prompts_stand_behind_decodes_and_padding_is_one_more_prompt_of_the_null_block() -> None:
    steps = inputs(LateQueue())
    steps.stage(build_batch(decode(50, MOST_ROWS), BLOCK_SIZE), MOST_ROWS, DECODES)()
    for num_decodes, query_lens in ((1, (3, 2)), (2, (8,)), (0, (2,))):
        prompts = [ScheduledRow(range(10, 10 + count), 1, np.array([7, 8, 9], np.int32)) for count in query_lens]
        steps.stage(build_batch([*decode(20, num_decodes), *prompts], BLOCK_SIZE), num_decodes, BESIDE_PROMPTS)()
        found = {name: tensor.tolist() for name, tensor in steps.tensors(BESIDE_PROMPTS).items()}
        decoding, tokens, left = range(num_decodes), sum(query_lens), 2 - len(query_lens)
        assert found["token_ids"] == [
            *(20 + row for row in decoding), *[0] * (2 - num_decodes),
            *(10 + at for count in query_lens for at in range(count)), *[0] * (8 - tokens),
        ]  # fmt: skip
        assert found["slot_mapping"][2 + tokens :] == [-1] * (8 - tokens)
        assert found["decode_lens"] == [*(5 + row for row in decoding), *[0] * (2 - num_decodes)]
        assert found["prefill_lens"][: len(query_lens)] == [1 + count for count in query_lens]
        assert found["prefill_lens"][-1] == 8 - tokens
        assert found["prefill_locs"] == [*np.cumsum([0, *query_lens]).tolist(), *[tokens] * left, 8]
        assert found["prefill_tables"][-1] == [0] * WIDTH
        ends = [2 + end - 1 for end in np.cumsum(query_lens).tolist()]
        logits = num_decodes + len(query_lens)
        assert found["logit_rows"] == [*decoding, *ends, *[0] * (MOST_ROWS - logits)]


def test_a_third_step_that_nobody_has_copied_is_refused() -> None:
    steps = inputs(LateQueue())
    for _ in range(2):
        steps.stage(build_batch(decode(20, 1), BLOCK_SIZE), 1, DECODES)
    with pytest.raises(AssertionError, match="two steps"):
        steps.stage(build_batch(decode(20, 1), BLOCK_SIZE), 1, DECODES)


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
        steps.stage(build_batch(decode(20, num_rows), BLOCK_SIZE), num_rows, DECODES, None, counted)()
        assert slots[where].tolist() == [3, 4][:count]
        assert addends[where].tolist() == [2] * count
        assert penalties[:, where].tolist() == columns[:, :count].tolist()
        others = [row for row in range(MOST_ROWS) if row not in where]
        assert slots[others].tolist() == [PADDING_SLOT] * len(others)
        assert addends[others].tolist() == [0] * len(others)
        assert penalties.T[others].tolist() == [[1.0, 0.0, 0.0]] * len(others)
