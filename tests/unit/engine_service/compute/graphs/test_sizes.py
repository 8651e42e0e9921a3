"""The sizes that are captured, and the one that a batch takes."""

import pytest

from kvkeeper.engine_service.compute.graphs.graph_api import MOST_ROWS, graph_sizes, size_for


def test_small_sizes_singly_then_in_steps():
    assert graph_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert graph_sizes(256)[-3:] == [224, 240, 256]
    assert len(graph_sizes(256)) == 27


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 200, 255, 256, 511, 512, 1000, 65536])
def test_every_batch_up_to_the_limit_has_a_size_and_little_padding(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, MOST_ROWS)
    for rows in range(1, sizes[-1] + 1):
        size = size_for(rows, sizes)
        assert size is not None
        assert rows <= size <= max(rows + 7 if rows < 112 else rows + 15, 1)
    assert size_for(sizes[-1] + 1, sizes) is None
