"""gather_blocks and scatter_blocks against their references, on the CPU and, interpreted, on the Triton path."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.gather_blocks import gather_blocks
from kvkeeper.kernels.gpu.swap_blocks import runs_of
from kvkeeper.kernels.scatter_blocks import scatter_blocks
from tests.unit.kernels.gpu.pretend import on_cuda

IDS = [[], [3], [5, 1, 2, 3, 7, 6], [1, 2, 3, 4]]
BLOCK = (2, 2, 3, 700)  # more than one program's share


def to_host(arena, staged):
    return *on_cuda(arena), staged


PATHS = {"cpu": lambda *both: both, "cuda": on_cuda, "host": to_host, "host, small blocks": to_host}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    small = (1 << 30) if "small" in request.param else 0
    monkeypatch.setattr("kvkeeper.kernels.gpu.swap_blocks._SMALL_BYTES", small)
    if PATHS[request.param] is to_host:
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    return PATHS[request.param]


@pytest.mark.parametrize("block_ids", IDS, ids=str)
def test_gathered_blocks(path, block_ids):
    arena = torch.randn(8, *BLOCK).half()
    staged, expected = (torch.full((len(block_ids), *BLOCK), float("nan")).half() for _ in range(2))
    reference.gather_blocks(arena, block_ids, expected)
    arena, found = path(arena, staged)
    gather_blocks(arena, block_ids, found)
    assert torch.equal(staged, expected)


@pytest.mark.parametrize("block_ids", IDS, ids=str)
def test_scattered_blocks(path, block_ids):
    arena, staged = torch.randn(8, *BLOCK).half(), torch.randn(len(block_ids), *BLOCK).half()
    expected = arena.clone()
    reference.scatter_blocks(staged, block_ids, expected)
    on_device, from_host = path(arena, staged)
    scatter_blocks(from_host, block_ids, on_device)
    assert torch.equal(arena, expected)


def test_runs():
    assert list(runs_of([5, 1, 2, 3, 7, 6])) == [(0, 1), (1, 4), (4, 5), (5, 6)]
    assert list(runs_of([])) == []


def test_refusals():
    arena, staged = torch.zeros(4, 6), torch.zeros(2, 6)
    for call in (
        lambda: gather_blocks(arena, [1, 4], staged),
        lambda: gather_blocks(arena, [1], staged),
        lambda: gather_blocks(arena, [1, 2], staged.half()),
        lambda: gather_blocks(*on_cuda(arena), [1, 2], staged),
        lambda: scatter_blocks(staged, [1, 1], arena),
        lambda: scatter_blocks(staged, [0, 1], arena),
    ):
        with pytest.raises(KernelArgumentError):
            call()
