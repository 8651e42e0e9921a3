"""What is done to weights between the last stored tensor of a layer and its first step.

Norms that are stored less 1 get it back, a bias that all ranks would add is left to the first of them, dimensions that are
rotated together come to lie half a head apart, and projections are packed as their device multiplies them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch

from kvkeeper.kernels.activations.linear import pack_linear
from kvkeeper.kernels.activations.linear_float8 import fits_float8, quantise_float8
from kvkeeper.kernels.activations.linear_integers import quantise_linear
from kvkeeper.kernels.attention.latent_widths import LatentWidths
from kvkeeper.kernels.types import LinearWeight

from ..config import ModelConfig
from ..decoder import DecoderWeights, LayerWeights
from ..dtype_name import FLOAT8
from ..experts import ExpertWeights, MlpWeights, Weight
from ..rotary_table import rotated_order
from ..split import Split, config_of_rank

Numbers = Literal[8, 4, "fp8"]  # bits of integers, or 8-bit floats
# Of the product with the vocabulary, which says which token is likeliest: 8 bits for any integers, and beside floats its own.
_OF_HEAD: Mapping[Numbers | None, Numbers | None] = {8: 8, 4: 8, FLOAT8: None, None: None}


class Packing:
    """How the weights of a rank are finished. numbers: what projections multiply; None: they stay as they are.

    Its methods raise KernelArgumentError for weights that cannot be quantised, and UnsupportedDeviceError where nothing
    multiplies such numbers.
    """

    def __init__(self, config: ModelConfig, split: Split, numbers: Numbers | None) -> None:
        """config: of the whole model. Raises UnsupportedModelError where it cannot be split so."""
        self._config, self._split, self._numbers = config_of_rank(config, split), split, numbers

    def finish_layer(self, layer: LayerWeights) -> LayerWeights:
        """A layer whose tensors are all read. Its dense projections are not needed any more."""
        if self._config.norm_offset:
            for norm in _list_norms(layer):
                norm.add_(1)
        if not self._split.is_first:
            for bias in _biases_added_up(layer):
                bias.zero_()
        _pair_rotated(self._config, layer)
        return _pack_layer(layer, partial(self._pack, numbers=self._numbers))

    def finish_rest(self, weights: DecoderWeights) -> DecoderWeights:
        """The same of what is no layer's."""
        if self._config.norm_offset:
            weights.norm.add_(1)
        inputs = weights.inputs
        return dataclasses.replace(
            weights,
            lm_head=self._pack(weights.lm_head, _OF_HEAD[self._numbers]),
            inputs=None if inputs is None else inputs.packed(partial(self._pack, numbers=self._numbers)),
        )

    def _pack(self, weight: Weight, numbers: Numbers | None) -> Weight:
        assert isinstance(weight, LinearWeight), "a weight is packed once"
        if numbers == FLOAT8 and weight.data.dim() > 2:
            numbers = 8  # of experts, whose rows are multiplied in groups
        if numbers == FLOAT8:
            return quantise_float8(weight) if fits_float8(weight) else pack_linear(weight)
        return pack_linear(weight) if numbers is None else quantise_linear(weight, numbers)


def _pack_layer(layer: LayerWeights, pack: Callable[[Weight], Weight]) -> LayerWeights:
    parts: dict[str, Any] = {name: getattr(layer, name) for name in ("own_input", "latent", "mixer", "mlp")}
    packed = {name: part.packed(pack) for name, part in parts.items() if part is not None}
    packed |= {name: pack(weight) for name, weight in (("qkv", layer.qkv), ("o", layer.o)) if weight is not None}
    return dataclasses.replace(layer, **packed)


def _biases_added_up(layer: LayerWeights) -> Iterator[torch.Tensor]:
    """The biases of what is added up over the ranks: one rank has to add them, and no other."""
    weights: list[Weight | None] = [layer.o]
    if isinstance(layer.mlp, MlpWeights):
        weights.append(layer.mlp.down)
    elif isinstance(layer.mlp, ExpertWeights):
        beside = None if layer.mlp.beside is None else layer.mlp.beside.mlp
        weights += [each.down for each in (layer.mlp.stacked, layer.mlp.shared, beside) if each is not None]
        weights.append(layer.mlp.leave)
    yield from (weight.bias for weight in weights if weight is not None and weight.bias is not None)


def _list_norms(layer: LayerWeights) -> Iterator[torch.Tensor]:
    latent = () if layer.latent is None else (layer.latent.query_norm, layer.latent.norm)
    norms = (*latent, layer.input_norm, layer.post_norm, layer.qk_norm, layer.attention_out_norm, layer.mlp_out_norm)
    yield from (norm for norm in norms if norm is not None)


def _pair_rotated(config: ModelConfig, layer: LayerWeights) -> None:
    """Bring the dimensions of queries and keys into the order of rotated_order, where only a part of each head is rotated."""
    if config.latent is not None:
        if config.latent.are_sides and layer.latent is not None:
            _pair_latents(config.latent.widths, layer)
        return
    rotated_dim = config.rope.rotated_dim(config.head_dim)
    if layer.mixer is not None or (rotated_dim == config.head_dim and not config.pairs_sides):
        return
    order = _from_sides(config.head_dim) if config.pairs_sides else rotated_order(config.head_dim, rotated_dim)
    num_rows = (config.num_heads + config.num_kv_heads) * config.head_dim
    assert isinstance(layer.qkv, LinearWeight) and config.qk_norm != "whole", "no such family"
    if layer.qk_norm is not None:
        layer.qk_norm.copy_(layer.qk_norm[:, order.to(layer.qk_norm.device)])
    for stored in (layer.qkv.data, layer.qkv.bias):
        if stored is not None:
            heads = stored[:num_rows].unflatten(0, (-1, config.head_dim))
            heads.copy_(heads[:, order.to(heads.device)])


def _from_sides(num_dims: int) -> torch.Tensor:
    """Where each of these dimensions comes from, so that pairs that are stored side by side are half of them apart."""
    return torch.arange(num_dims).view(-1, 2).T.flatten()


def _pair_latents(widths: LatentWidths, layer: LayerWeights) -> None:
    """Bring dimensions that are stored in pairs side by side half a head apart: all first ones, then all second ones."""
    order = _from_sides(widths.rope)
    assert layer.latent is not None and isinstance(layer.latent.down, LinearWeight)
    down, query_up = layer.latent.down, layer.latent.query_up
    num_query = down.data.shape[0] - widths.latent - widths.rope
    assert query_up is None or isinstance(query_up, LinearWeight)
    queries = down.data[:num_query] if query_up is None else query_up.data
    heads = queries.unflatten(0, (-1, widths.key + widths.rope))[:, widths.key :]
    turned = [heads.transpose(0, 1), down.data[-widths.rope :]]
    turned += [] if down.bias is None else [down.bias[-widths.rope :]]
    for each in turned:
        each.copy_(each[order.to(each.device)])
