"""Blocks that cross between a device and a host tier of few bits: by copies that the host does not wait for, many in one call.

The device is torch's meta device: operations on it are seen as they are dispatched, and it has no bytes to be read.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kvkeeper.engine_service.ranks.block_copies import SWAP_OUT, BlockMover, PackedCopies, copy_spans
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.host_blocks import HostBlocks

SWAP_IN, NUM_BLOCKS = 2, 40


class Crossings(TorchDispatchMode):
    """Notes each operation that reads one memory and writes the other: whether the host goes on meanwhile.

    Bytes leave the meta device by no operation, so those are not run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = {each.device for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)}
        devices |= {torch.device(kwargs["device"])} if devices and kwargs.get("device") else set()
        if len(devices) < 2:
            return function(*args, **kwargs)
        name = function.overloadpacket.__name__
        self.found.append((name, bool(kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,)))))
        return args[0] if name == "copy_" else function(*args, **kwargs)


def moved(orders: Sequence[tuple[int, int, int, int]]) -> tuple[list[tuple[str, bool]], list[int]]:
    """What crossed, and how many rows each call of the copies between both memories was given."""
    packing = HostBlocks(4, 2, 2, 4, torch.bfloat16, FORMATS["int8"])
    device = torch.empty((NUM_BLOCKS, 4 * 2 * 2 * 4 * 2), dtype=torch.uint8, device="meta")
    host = torch.zeros((NUM_BLOCKS, packing.block_bytes), dtype=torch.uint8)
    calls: list[int] = []

    def crossing(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        calls.append(len(pairs))
        copy_spans(source, target, pairs)

    mover = BlockMover(device, host, PackedCopies(packing, crossing))
    with Crossings() as crossings:
        done, failed = mover.move(orders)
    assert (sorted(done), failed) == ([order[0] for order in orders], [])
    return crossings.found, calls


@pytest.mark.parametrize("kind", [SWAP_OUT, SWAP_IN])
def test_the_host_waits_for_no_block_and_hands_many_to_one_call(kind: int) -> None:
    found, calls = moved([(at, kind, (3 * at) % NUM_BLOCKS, (7 * at) % NUM_BLOCKS) for at in range(NUM_BLOCKS)])
    assert found == [("copy_", True)] * NUM_BLOCKS, "these are no neighbours"
    assert calls == [16, 16, 8]


@pytest.mark.parametrize("kind", [SWAP_OUT, SWAP_IN])
def test_neighbours_cross_as_one(kind: int) -> None:
    found, calls = moved([(at, kind, at, at) for at in range(20)])
    assert found == [("copy_", True)] * 2
    assert calls == [16, 4]
