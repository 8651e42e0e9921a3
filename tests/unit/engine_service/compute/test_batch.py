"""build_batch against a reading of its definition, token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch


def spelled(rows, block_size):
    """The columns that a batch must have, one token at a time."""
    tokens, positions, slots, logits = [], [], [], []
    for row in rows:
        for i, token in enumerate(row.token_ids):
            position = row.context_len + i
            tokens.append(token)
            positions.append(position)
            slots.append(int(row.block_table[position // block_size]) * block_size + position % block_size)
            last = i == len(row.token_ids) - 1
            if row.want_logits is WantLogits.ALL or (row.want_logits is WantLogits.LAST and last):
                logits.append(len(tokens) - 1)
    return tokens, positions, slots, logits


@st.composite
def scheduled_rows(draw, block_size):
    num_tokens, context_len = draw(st.integers(1, 9)), draw(st.integers(0, 9))
    num_blocks = -(-(num_tokens + context_len) // block_size) + draw(st.integers(0, 2))
    table = np.array(draw(st.lists(st.integers(1, 99), min_size=num_blocks, max_size=num_blocks)), dtype=np.int32)
    return ScheduledRow(list(range(10, 10 + num_tokens)), context_len, table, draw(st.sampled_from(WantLogits)))


@settings(deadline=None)
@given(st.data())
def test_columns_spell_the_rows(data):
    block_size = data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(scheduled_rows(block_size), min_size=1, max_size=5))
    batch = build_batch(rows, block_size)
    tokens, positions, slots, logits = spelled(rows, block_size)
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.logit_rows.tolist() == logits
    for s, row in enumerate(rows):
        assert batch.query_start_loc[s + 1] - batch.query_start_loc[s] == len(row.token_ids)
        assert batch.seq_lens[s] == row.context_len + len(row.token_ids)
        used = -(-int(batch.seq_lens[s]) // block_size)
        assert batch.block_tables[s, :used].tolist() == row.block_table[:used].tolist()
        assert not batch.block_tables[s, used:].any()
        first, last = batch.logit_start_loc[s : s + 2]
        owned = batch.logit_rows[first:last]
        assert ((owned >= batch.query_start_loc[s]) & (owned < batch.query_start_loc[s + 1])).all()
    assert batch.logit_start_loc[-1] == len(logits)


def test_a_decode_batch_of_many_sequences():
    rows = [ScheduledRow(np.array([i]), 3 * i, np.arange(1, 60, dtype=np.int32)) for i in range(256)]
    batch = build_batch(rows, 16)
    assert batch.token_ids.tolist() == list(range(256))
    assert batch.slot_mapping.tolist() == [3 * i + 16 for i in range(256)]
    assert batch.logit_rows.tolist() == list(range(256))


@pytest.mark.parametrize(
    "row",
    [
        ScheduledRow([1, 2], 3, np.array([7], dtype=np.int32)),
        ScheduledRow([], 0, np.array([7], dtype=np.int32)),
        ScheduledRow([1], -1, np.array([7], dtype=np.int32)),
    ],
)
def test_a_row_that_breaks_its_promise_is_a_bug(row):
    with pytest.raises(AssertionError):
        build_batch([row], 4)


def test_a_batch_has_rows():
    with pytest.raises(AssertionError):
        build_batch([], 4)
