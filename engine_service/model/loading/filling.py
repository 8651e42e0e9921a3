"""Filling: stored tensors on their way into the weights of a rank.

A layer is allocated when the first of its tensors comes, and packed when the last one is there. So a load needs the memory of
the packed model and of the layers that are being read, which is one as files are written. Every tensor has one place, and is
stored once.
"""

from functools import partial
from typing import Final

import torch

from ..checkpoint.destination import Destination
from ..checkpoint.errors import UnsupportedModelError, WeightsError, name_first
from ..checkpoint.safetensors_files import StoredTensor
from ..checkpoint.text_part import find_layer
from ..checkpoint.unneeded import EMBEDDINGS, HEAD
from ..config import ModelConfig
from ..decoder import DecoderWeights, LayerWeights
from ..split import Split
from .packing import Packing
from .weight_map import allocate_layer, allocate_rest

WEIGHT_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _allocate(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class Filling:
    """The weights of one load."""

    def __init__(self, config: ModelConfig, split: Split, dtype: torch.dtype, device: torch.device, packing: Packing) -> None:
        """config: of the whole model."""
        self._config, self._split, self._packing = config, split, packing
        self._empty = partial(_allocate, dtype=dtype, device=device)
        self._rest, self._wanted = allocate_rest(config, split, self._empty)
        self._begun: dict[int, tuple[LayerWeights, dict[str, Destination]]] = {}
        self._finished: dict[int, LayerWeights] = {}
        self._used: dict[str, str] = {}  # stored names, and the files that they were read from

    def take_head_as_embeddings(self) -> None:
        """The one tensor that both are is stored under the head's name."""
        self._wanted[f"{HEAD}weight"] = self._wanted.pop(f"{EMBEDDINGS}weight")

    def put(self, file_name: str, name: str, tensor: torch.Tensor | StoredTensor) -> None:
        """Copy a tensor to its place, and pack its layer where it is the last one.

        Raises:
            WeightsError: it has no place, has one that is filled already, or is of another shape.
            UnsupportedModelError: another dtype.
            KernelArgumentError, UnsupportedDeviceError: as of Packing.
        """
        index = find_layer(name)
        wanted = self._wanted if index is None else self._begin(index)
        destination = wanted.pop(name, None)
        if destination is None:
            raise WeightsError(file_name, self._why_no_place(name))
        self._used[name] = file_name
        if tuple(tensor.shape) != destination.shape:
            raise WeightsError(file_name, f"tensor {name} has shape {tuple(tensor.shape)}, must have {destination.shape}")
        if tensor.dtype not in WEIGHT_DTYPES.values():
            raise UnsupportedModelError("weight dtype", str(tensor.dtype), ", ".join(WEIGHT_DTYPES))
        destination.fill(tensor)
        if index is not None and not wanted:
            del destination  # it would hold dense weights while they are packed
            self._finished[index] = self._packing.finish_layer(self._begun.pop(index)[0])

    def finish(self, model: str) -> DecoderWeights:
        """The weights, whose layers alone are packed. Raises WeightsError, which names the model, where tensors are missing."""
        missing = [*self._wanted, *(name for _, wanted in self._begun.values() for name in wanted)]
        on_nothing = partial(_allocate, device=torch.device("meta"))
        for index in set(range(self._config.num_layers)) - self._finished.keys() - self._begun.keys():
            missing += allocate_layer(self._config, self._split, index, on_nothing)[1]
        if missing:
            raise WeightsError(model, f"tensors are missing: {name_first(missing)}")
        self._rest.layers.extend(self._finished[index] for index in range(self._config.num_layers))
        return self._rest

    def _begin(self, index: int) -> dict[str, Destination]:
        """What is left of a layer, which is allocated where nothing of it has come; nothing, where the model has none such."""
        if index in self._finished or index >= self._config.num_layers:
            return {}
        if index not in self._begun:
            self._begun[index] = allocate_layer(self._config, self._split, index, self._empty)
        return self._begun[index][1]

    def _why_no_place(self, name: str) -> str:
        if name in self._used:
            return f"tensor {name} is stored twice, in {self._used[name]} before"
        described = f"{self._config.family}, {self._config.num_layers} layers"
        return f"tensor {name} is not part of the model that config.json describes ({described})"
