"""ModelRunner: the model on the memory of the cache service.

Turns a Batch into tensors, runs the decoder on the arena that it was given, and returns logits. It holds no K or V of
its own and knows no sequence: the block tables say which blocks to read and write.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from kvkeeper.kernels.copy_blocks import copy_blocks
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.scratch import Scratch

from ..model.attention import AttentionMetadata, attention_arrays, build_attention_metadata
from ..model.checkpoint.errors import ModelError
from ..values.batch import Batch
from .upload import upload_to


class Runner(Protocol):
    """What the engine's loop needs of a model; ModelRunner and the hash toy both are one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def layout(self) -> KvLayout: ...

    def forward(self, batch: Batch) -> torch.Tensor: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def synchronize(self) -> None: ...


class Shape(Protocol):
    """The part of a model's config that decides its K and V."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def windows(self) -> tuple[int | None, ...]: ...


class Model(Protocol):
    """A Decoder, or a TransformersModel; the former explains forward."""

    dtype: torch.dtype
    device: torch.device

    @property
    def config(self) -> Shape: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        max_position: int,
        kv_view: torch.Tensor,
        metadata: AttentionMetadata,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...


def kv_layout_of(config: Shape, dtype: torch.dtype, block_size: int) -> KvLayout:
    """The layout of the blocks that a model of this config, computing in `dtype`, needs."""
    return KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype, block_size)


class ModelRunner:
    """A decoder on an arena."""

    def __init__(self, model: Model, kv_view: torch.Tensor, layout: KvLayout) -> None:
        """
        Args:
            model: the loaded decoder.
            kv_view: KvLayout.view of the arena, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
            layout: the arena's.

        Raises:
            ModelError: the arena's layout is not the model's.
        """
        needed = kv_layout_of(model.config, model.dtype, layout.block_size)
        if layout != needed or kv_view.shape[1:] != layout.view_shape or kv_view.dtype != layout.dtype:
            raise ModelError(f"the arena's layout {layout} is not the model's {needed}")
        self._model = model
        self._kv_view = kv_view
        self._layout = layout
        self._scratch = Scratch(kv_view.device)
        self._upload = upload_to(kv_view)

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's tokens, writing their K and V into their slots.

        Returns:
            Logits of batch.logit_rows, float32 [R, vocab_size].
        """
        windows, dtype = self._model.config.windows, self._model.dtype
        arrays = {"token_ids": batch.token_ids, "positions": batch.positions, "logit_rows": batch.logit_rows}
        with self._current_device():
            tensors = self._upload(arrays | attention_arrays(batch))
            metadata = build_attention_metadata(tensors, self._kv_view[:, 0], windows, dtype, self._scratch)
            return self._model.forward(
                tensors["token_ids"],
                tensors["positions"],
                int(batch.positions.max()),
                self._kv_view,
                metadata,
                tensors["logit_rows"],
            )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Run (source, destination) block copies in order; a later one sees what earlier ones wrote."""
        with self._current_device():
            copy_blocks(self._kv_view, pairs)

    def synchronize(self) -> None:
        """Wait until the device has done all the work it was given."""
        if self._kv_view.device.type == "cuda":
            torch.cuda.synchronize(self._kv_view.device)

    def _current_device(self) -> AbstractContextManager[None]:
        """Kernels are launched on the thread's current device."""
        return torch.cuda.device(self._kv_view.device) if self._kv_view.device.type == "cuda" else nullcontext()
