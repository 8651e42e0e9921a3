"""The layout: bytes of a block, the view, refusals."""

import pytest
import torch

from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.layout import KvLayout, KvShape

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float16, block_size=4)


def test_block_bytes_counts_both_k_and_v_of_all_layers():
    assert LAYOUT.block_bytes == 2 * 3 * 2 * 8 * 4 * 2


def test_one_block_is_contiguous_bytes_of_the_arena():
    arena_bytes = torch.zeros(5 * LAYOUT.block_bytes, dtype=torch.uint8)
    view = LAYOUT.view(arena_bytes)
    assert view.shape == (5, 3, 2, 4, 2, 8)
    view[2].fill_(1.0)
    rows = arena_bytes.view(5, -1)
    assert bool((rows[2].view(torch.float16) == 1).all())
    assert not rows[[0, 1, 3, 4]].any()


@pytest.mark.parametrize(
    "arena",
    [
        torch.zeros(LAYOUT.block_bytes + 1, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(LAYOUT.block_bytes, dtype=torch.int8),
        torch.zeros(2, LAYOUT.block_bytes, dtype=torch.uint8),
        torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8)[::2],
    ],
)
def test_view_refuses_arenas_that_are_not_whole_blocks(arena):
    with pytest.raises(KernelArgumentError, match="arena_bytes"):
        LAYOUT.view(arena)


def test_counts_must_be_positive():
    with pytest.raises(KernelArgumentError, match="num_kv_heads"):
        KvLayout(1, 0, 8, torch.float32, 4)


def test_groups_of_several_shapes_begin_where_their_blocks_do() -> None:
    layout = KvLayout(3, 2, 8, torch.float32, 4, others=(KvShape(2, 4, 4), KvShape(1, 1, 16)))
    assert layout.view_shape == (3 * 2 * 4 * 2 * 8,)
    assert layout.block_bytes == 4 * 3 * 2 * 4 * 2 * 8
    memory = torch.zeros(5 * layout.block_bytes, dtype=torch.uint8)
    view = layout.view(memory)
    shapes = [(5, 3, 2, 4, 2, 8), (5, 2, 2, 4, 4, 4), (5, 1, 2, 4, 1, 16)]
    for group, shape in enumerate(shapes):
        blocks = layout.view_group(view, group)
        assert blocks.shape == shape
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(group))
        blocks[group] = numbers[group]
        assert torch.equal(view[group, : numbers[group].numel()], numbers[group].flatten())
        assert not view[group, numbers[group].numel() :].any(), "the rest is unused"
    assert not view[3:].any()


@pytest.mark.parametrize("others", [(KvShape(1, 0, 8),), (KvShape(1, 7, 9),)], ids=["no-heads", "a-rest"])
def test_shapes_that_do_not_fill_a_block_are_refused(others: tuple[KvShape, ...]) -> None:
    with pytest.raises(KernelArgumentError, match="KvLayout"):
        KvLayout(3, 2, 8, torch.float32, 4, others=others)
