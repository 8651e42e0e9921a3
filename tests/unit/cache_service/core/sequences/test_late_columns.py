"""What steps leave for later is there at the next look."""

import numpy as np

from kvkeeper.cache_service.core.sequences.late_columns import Accesses, TokenRows


def test_a_look_at_one_row_sees_what_was_noted_of_it() -> None:
    num_tokens = np.array([1, 1, 1], np.int32)
    rows = TokenRows(num_tokens, 4)
    one = np.ones(1, np.int32)
    for position, token in ((0, 5), (1, 6), (2, 7)):
        rows.append(np.array([1]), np.array([position], np.int32), one, np.array([token], np.int32), one_each=True)
    assert rows.rows(1)[1, :3].tolist() == [5, 6, 7]
    num_tokens[1] = 3
    assert rows.known(1).tolist() == [5, 6, 7]


def test_a_prompt_takes_a_row_once_it_starts() -> None:
    rows = TokenRows(np.array([0, 2], np.int32), 4)
    rows.wait(1, np.array([8, 9], np.int32))
    assert (rows.waiting_slots, rows.known(1).tolist(), rows.all[1, :2].tolist()) == ({1}, [8, 9], [0, 0])
    rows.end_wait(1, is_kept=True)
    assert (rows.waiting_slots, rows.known(1).tolist()) == (frozenset(), [8, 9])


def test_accesses_are_counted_at_a_look() -> None:
    accesses = Accesses(2)
    accesses.begin(1, 1.0)
    accesses.note(np.array([1]), 2.0)
    accesses.note(np.array([0, 1]), 3.0)
    assert (accesses.counts.tolist(), accesses.last.tolist()) == ([1, 2], [3.0, 3.0])
