"""state_columns: rows of states as compiled kernels are given them."""

from ..types import StateChunks, StateRows


def state_columns(rows: StateRows | StateChunks) -> tuple[int, ...]:
    """Addresses: the pages that are read, where chunks start, their first tokens, how many they have, the pages written.

    Of a column that is not there it is 0: each row is one chunk of one token, in order.
    """
    if isinstance(rows, StateRows):
        tokens = 0 if rows.tokens is None else rows.tokens.data_ptr()
        return rows.reads.data_ptr(), 0, tokens, 0, rows.writes.data_ptr()
    columns = rows.reads, rows.starts, rows.firsts, rows.lens, rows.writes
    return tuple(column.data_ptr() for column in columns)
