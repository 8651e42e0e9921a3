"""Rows with a table of each group of layers."""

import numpy as np

from kvkeeper.engine_service.scheduler.limits import WHOLE, Limits, ReadSpan
from kvkeeper.engine_service.scheduler.running import RunningSequences
from kvkeeper.engine_service.values.request import Request, Sequence, SequenceState


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_new_blocks_go_behind_each_groups_own() -> None:
    running = RunningSequences(num_rows=2, max_len=32, block_size=4, num_groups=3)
    rows = []
    for sequence_id in (1, 2):
        request = Request(f"r{sequence_id}", np.arange(5, dtype=np.int32), 4)
        sequence = Sequence(request, 0, request.prompt, SequenceState.RUNNING)
        sequence.sequence_id = sequence_id
        first = 10 * sequence_id
        rows.append(running.add(sequence, 0, 5, 8, int32(first, first + 1, 0, first + 3, first + 4, first + 5)))
    # Two blocks for the second row and one for the first, group by group, as the cache service tells them.
    items, groups = int32(0, 1, 1), int32(0, 1, 2)
    blocks = np.arange(50, 59, dtype=np.int32)
    running.append_blocks(np.array(rows), np.tile(items, 3), blocks, np.repeat(groups, 3))
    first, second = rows
    assert running.group_tables[first, :, :4].tolist() == [[10, 11, 50, 0], [0, 13, 53, 0], [14, 15, 56, 0]]
    assert running.group_tables[second, :, :4].tolist() == [[20, 21, 51, 52], [0, 23, 54, 55], [24, 25, 57, 58]]
    assert running.num_held(first) == 8
    assert running.get_table(second, 1).tolist() == [20, 0, 24]
    running.remove(running.sequences[first])  # type: ignore[arg-type]
    assert not running.tables[first].any()


def test_a_cut_is_possible_where_every_window_is_whole() -> None:
    limits = Limits(block_size=4, max_len=64, max_known_sequences=1, group_spans=(WHOLE, ReadSpan(7)))
    # 21 tokens: the next reads from 15 on, so 12 tokens are gone; the next behind 18 tokens reads from 12 on.
    assert [limits.may_cut(21, length) for length in (21, 18, 17, 1)] == [True, True, False, False]
    assert limits.may_cut(9, 1)  # nothing is gone yet
    chunked = Limits(block_size=4, max_len=64, max_known_sequences=1, group_spans=(WHOLE, ReadSpan(8, is_chunk=True)))
    assert [chunked.may_cut(21, length) for length in (21, 16, 15)] == [True, True, False]
    assert chunked.num_held(int32(24, 23, 7), int32(25, 24, 8)).tolist() == [7 + 1, 6 + 2, 2 + 2]
    assert limits.num_held(int32(21, 9), int32(22, 40)).tolist() == [6 + 3, 10 + 10]


def test_states_take_blocks_where_they_are_kept() -> None:
    """Of checkpoints, of the last entry of a grant, and of what is read and written."""
    spans = (WHOLE, ReadSpan(2, checkpoint_blocks=3), ReadSpan(2, checkpoint_blocks=2))
    limits = Limits(block_size=4, max_len=64, max_known_sequences=1, group_spans=spans)
    assert (limits.has_states, limits.hit_unit) == (True, 24)
    # From no entry to 7: 2 checkpoints and the last entry; 3 and the last. From 5 to 6: the last, which is both. None: nothing.
    assert limits.num_granted(int32(0), int32(25)) == 7 + 3 + 4
    assert limits.num_granted(int32(5, 5, 5), int32(24, 20, 1)) == 1 + 1 + 1
    assert limits.num_held(int32(24, 0), int32(25, 1)).tolist() == [7 + 4 + 5, 1 + 1 + 1]
    assert limits.may_cut(40, 1)  # the answer tells how much of it is committed
