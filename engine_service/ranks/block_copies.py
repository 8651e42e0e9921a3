"""How many blocks are copied at once between a device and the host tier, on the stream that is current.

Large blocks go by the device's copy engines, which leave its processors to the model: all of them in one call, where the driver
has one for that, and neighbours as one copy. Below some 28 KB copy engines get a tenth of the bus's speed, and one launch of a
kernel that reads and writes the host's memory is faster; that memory has to be pinned. On a processor they are plain copies.

BlockMover runs transfer orders of the cache service by them, a step's together; those that do not depend on each other go in
one call.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Final

import structlog
import torch

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.runtime import MOST_COPIES, cuda_runtime
from kvkeeper.kernels.copy_blocks import independent_runs, move_blocks
from kvkeeper.kernels.quantised.host_blocks import HostBlocks

log = structlog.get_logger()

# (source [n, block_bytes], target [m, block_bytes], pairs that do not depend on each other): launched, or done, on return
BlockCopies = Callable[[torch.Tensor, torch.Tensor, Sequence[tuple[int, int]]], None]
_SMALL_BYTES = 28 * 1024
_TOGETHER: Final = 16  # blocks that are converted at once
_FEWEST_SMALL = 16  # fewer blocks are copied faster than a kernel is launched


def copies_for(packing: HostBlocks | None, device: torch.device, host_blocks: torch.Tensor) -> BlockCopies:
    """The way for blocks between the device and these of the host. packing: None: the tiers have the same bytes."""
    crossing = copies_between(device, host_blocks)
    return crossing if packing is None else PackedCopies(packing, crossing)


def copies_between(device: torch.device, host_blocks: torch.Tensor) -> BlockCopies:
    """The way for blocks between the device and these of the host, which may be pinned later."""
    if device.type != "cuda":
        return copy_spans
    index = device.index or 0
    batched = BatchedCopies(index, lambda: torch.cuda.current_stream(index).cuda_stream)
    is_small = host_blocks.shape[1] < _SMALL_BYTES
    return SmallCopies(batched, host_blocks.is_pinned) if is_small and len(host_blocks) else batched


def copy_spans(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """One copy for each row of neighbours. See BlockCopies."""
    for from_id, to_id, count in find_spans(source, target, pairs):
        target[to_id : to_id + count].copy_(source[from_id : from_id + count], non_blocking=True)


def find_spans(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """First block in source and in target, and how many, of blocks that lie behind each other in both."""
    is_dense = source.is_contiguous() and target.is_contiguous()  # not so where ranks share the host's blocks
    first_from = first_to = count = 0
    for from_id, to_id in sorted(pairs):
        if is_dense and count and (from_id, to_id) == (first_from + count, first_to + count):
            count += 1
            continue
        if count:
            yield first_from, first_to, count
        first_from, first_to, count = from_id, to_id, 1
    if count:
        yield first_from, first_to, count


class BatchedCopies:
    """One call of the driver for up to MOST_COPIES copies; one call for each where the driver has none for many."""

    def __init__(self, device: int, current_stream: Callable[[], int]) -> None:
        """current_stream: its handle. The default stream, which has none, cannot be given a batch."""
        self._device, self._current_stream = device, current_stream
        self._is_possible = True

    def __call__(self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """See BlockCopies."""
        stream = self._current_stream()
        if not stream or not self._is_possible or len(pairs) == 1:
            copy_spans(source, target, pairs)
            return
        spans, block_bytes = list(find_spans(source, target, pairs)), source.shape[1]
        for first in range(0, len(spans), MOST_COPIES):
            part = spans[first : first + MOST_COPIES]
            targets = [target.data_ptr() + to_id * target.stride(0) for _, to_id, _ in part]
            sources = [source.data_ptr() + from_id * source.stride(0) for from_id, _, _ in part]
            try:
                cuda_runtime().copy_many(self._device, stream, targets, sources, [count * block_bytes for *_, count in part])
            except CudaError as error:
                log.warning("no_batched_copies", message=f"blocks are copied one by one: {error}")
                self._is_possible = False
                copy_spans(source, target, pairs)  # a copy that was made before is made again
                return


class SmallCopies:
    """One launch of a kernel, for blocks that are too small for copy engines."""

    def __init__(self, others: BlockCopies, is_pinned: Callable[[], bool]) -> None:
        """others: for a few of them, and for all while the host's memory is not pinned: a kernel could not read it."""
        self._others, self._is_pinned = others, is_pinned

    def __call__(self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """See BlockCopies."""
        has_kernel = len(pairs) >= _FEWEST_SMALL and self._is_pinned()
        (move_blocks if has_kernel else self._others)(source, target, pairs)

    def make_ready(self, device_blocks: torch.Tensor, host_blocks: torch.Tensor) -> None:
        """Run the kernel once in each direction, by which memory may differ, so that none is compiled while requests wait.

        It takes the null block over and back: the device's stays as it is, and the host's is read by nothing else.
        """
        if not self._is_pinned():
            return
        with torch.cuda.device(device_blocks.device) if device_blocks.device.type == "cuda" else nullcontext():
            move_blocks(device_blocks, host_blocks, [(0, 0)])
            move_blocks(host_blocks, device_blocks, [(0, 0)])


class PackedCopies:
    """Copies to and from a host tier that keeps blocks in few bits; they are converted where the device has them.

    The few bits cross as other blocks do, into memory of the device or out of it, and the host waits for none of them: a
    conversion comes behind its copy in the order of the device. A few blocks are converted at once, since their numbers take as
    much memory again, in float32. The bytes of a row say which way blocks go: they are fewer on the host.
    """

    def __init__(self, packing: HostBlocks, crossing: BlockCopies) -> None:
        """crossing: copies rows of the few bits between the device and the host."""
        self._packing, self._crossing = packing, crossing

    def make_ready(self, device_blocks: torch.Tensor, host_blocks: torch.Tensor) -> None:
        """As SmallCopies does, of rows of the few bits."""
        if isinstance(self._crossing, SmallCopies):
            rows = torch.zeros((1, host_blocks.shape[1]), dtype=torch.uint8, device=device_blocks.device)
            self._crossing.make_ready(rows, host_blocks)

    def __call__(self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        is_out = target.shape[1] == self._packing.block_bytes
        for first in range(0, len(pairs), _TOGETHER):
            some = pairs[first : first + _TOGETHER]
            if is_out:
                packed = self._packing.pack(torch.stack([source[from_id] for from_id, _ in some]))
                self._crossing(packed, target, [(at, to_id) for at, (_, to_id) in enumerate(some)])
            else:
                packed = torch.empty((len(some), source.shape[1]), dtype=torch.uint8, device=target.device)
                self._crossing(source, packed, [(from_id, at) for at, (from_id, _) in enumerate(some)])
                copy_spans(self._packing.unpack(packed), target, [(at, to_id) for at, (_, to_id) in enumerate(some)])


SWAP_OUT, SWAP_IN = 1, 2  # TransferKinds of the protocol
Order = tuple[int, int, int, int]  # id, kind, source, destination


class BlockMover:
    """Moves blocks between tensors uint8 [blocks, block_bytes]."""

    def __init__(self, device_blocks: torch.Tensor, host_blocks: torch.Tensor, copies: BlockCopies | None = None) -> None:
        """copies: None: those that suit the memory."""
        self._device_blocks, self._host_blocks = device_blocks, host_blocks
        self._copies = copies or copies_between(device_blocks.device, host_blocks)

    def make_ready(self) -> None:
        """Compile what copies launch. To be called once the host's memory is pinned as far as it can be."""
        if isinstance(self._copies, SmallCopies | PackedCopies):
            self._copies.make_ready(self._device_blocks, self._host_blocks)

    def move(self, orders: Iterable[Order]) -> tuple[list[int], list[int]]:
        """Run the orders as if in order. Ids of those that are done, or on their way on a device, and of those that failed."""
        kept: list[Order] = []
        failed: list[Order] = []
        for order in orders:
            (kept if self._is_inside(*order[1:]) else failed).append(order)
        if failed:
            log.error("transfer_failed", order_ids=[order[0] for order in failed], message="no such block")
        done: list[Order] = []
        at = 0
        # A block of the host has a negative number here, so that all have one of their own.
        pairs = [(source, ~to) if kind == SWAP_OUT else (~source, to) for _, kind, source, to in kept]
        for run in independent_runs(pairs, at_once=True):
            ordered, at = kept[at : at + len(run)], at + len(run)
            for is_out in (True, False):
                chosen = [order for order in ordered if (order[1] == SWAP_OUT) == is_out]
                (done if self._copy(chosen, is_out=is_out) else failed).extend(chosen)
        return [order[0] for order in done], [order[0] for order in failed]

    def _copy(self, orders: list[Order], *, is_out: bool) -> bool:
        source, target = self._device_blocks, self._host_blocks
        if not is_out:
            source, target = target, source
        try:
            if orders:
                self._copies(source, target, [(from_id, to_id) for _, _, from_id, to_id in orders])
        except Exception:  # whatever a driver says of it: the cache service hears that they failed
            log.exception("transfer_failed", order_ids=[order[0] for order in orders])
            return False
        return True

    def _is_inside(self, kind: int, source: int, destination: int) -> bool:
        tiers = (self._device_blocks, self._host_blocks) if kind == SWAP_OUT else (self._host_blocks, self._device_blocks)
        return 0 <= source < len(tiers[0]) and 0 <= destination < len(tiers[1])
