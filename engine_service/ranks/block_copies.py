"""How many blocks are copied at once between a device and the host tier, on the stream that is current.

Large blocks go by the device's copy engines, which leave its processors to the model: all of them in one call, where the driver
has one for that, and neighbours as one copy. Below some 28 KB copy engines get a tenth of the bus's speed, and one launch of a
kernel that reads and writes the host's memory is faster; that memory has to be pinned. On a processor they are plain copies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import structlog
import torch

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.runtime import MOST_COPIES, cuda_runtime
from kvkeeper.kernels.copy_blocks import move_blocks

log = structlog.get_logger()

# (source [n, block_bytes], target [m, block_bytes], pairs that do not depend on each other): launched, or done, on return
BlockCopies = Callable[[torch.Tensor, torch.Tensor, Sequence[tuple[int, int]]], None]
_SMALL_BYTES = 28 * 1024
_FEWEST_SMALL = 16  # fewer blocks are copied faster than a kernel is launched


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
    for from_id, to_id, count in spans_of(source, target, pairs):
        target[to_id : to_id + count].copy_(source[from_id : from_id + count], non_blocking=True)


def spans_of(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
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
        spans, block_bytes = list(spans_of(source, target, pairs)), source.shape[1]
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
