"""Columns of tokens come out of bytes as they went in; columns that do not fit together are refused."""

import numpy as np
import pytest

from kvkeeper.engine_service.values.output_chunk import NO_TOKEN_COLUMNS, TokenColumns

SENT = TokenColumns(np.array([1, 2**40, 3], np.uint64), np.array([3, 1, 0]), np.array([5, 6, 7, 2**31 - 1], np.int32))


@pytest.mark.parametrize("sent", [SENT, NO_TOKEN_COLUMNS])
def test_columns_come_out_as_they_went_in(sent: TokenColumns) -> None:
    found = TokenColumns.from_bytes(sent.to_bytes())
    assert [column.tolist() for column in found] == [column.tolist() for column in sent]


@pytest.mark.parametrize("cut", [4, 8, 20])
def test_columns_that_do_not_fit_together_are_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="different lengths"):
        TokenColumns.from_bytes(SENT.to_bytes()[:-cut])
