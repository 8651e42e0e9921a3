"""Weights of quantised checkpoints: as numbers of few bits with scales, and the weights that are meant.

Each format's tensors become the same four parts in a QuantisedMatrix. A weight is (code - zero) * scale, in float32. MXFP4 has
experts as 4-bit floats E2M1, 32 inputs to a scale that is a power of two, E8M0 (OCP Microscaling Formats 1.0). `restored` makes
each weight of a checkpoint one tensor again.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from ..checkpoint.errors import WeightsError
from .scheme import Scheme

# AWQ's eight numbers of a 32-bit integer stand for outputs in this order.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class QuantisedMatrix(NamedTuple):
    """A weight [out, in].

    Attributes:
        codes: uint8, int8 or an 8-bit float, [out, in].
        scales: float32 [rows, groups]: of equally many outputs and inputs each, the last ones perhaps of fewer.
        zeros: integers of the shape of scales, or None for 0.
        group_of: int64 [in], where the inputs of a group lie apart.
        sides: outputs and inputs of a scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of: torch.Tensor | None
    sides: tuple[int, int]

    def dense(self) -> torch.Tensor:
        """float32 [out, in]."""
        weight = self.codes.float()
        if self.zeros is not None:
            weight -= self._spread(self.zeros)
        return weight.mul_(self._spread(self.scales))

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """[out or 1, in or 1], a value for each code."""
        values = values.float()
        num_out, num_in = self.codes.shape
        if values.shape[0] > 1 and self.sides[0] > 1:
            values = values.repeat_interleave(self.sides[0], 0)[:num_out]
        if values.shape[1] > 1:
            groups = torch.arange(num_in) // self.sides[1] if self.group_of is None else self.group_of
            values = values[:, groups]
        return values


def list_parts(scheme: Scheme) -> frozenset[str]:
    """The tensors that together stand for a weight, by the last part of their names."""
    if scheme.form == "mxfp4":
        return _MXFP4_PARTS
    if scheme.form == "gptq":
        return frozenset(("qweight", "qzeros", "scales", "g_idx"))
    if scheme.form == "awq":
        return frozenset(("qweight", "qzeros", "scales"))
    codes = "weight_packed" if scheme.form == "packed" else "weight"
    parts = {codes, scheme.scales}
    if scheme.form == "packed":
        parts.add("weight_shape")
    if scheme.has_zeros:
        parts.add("weight_zero_point")
    if scheme.has_order:
        parts.add("weight_g_idx")
    return frozenset(parts)


def make_matrix(scheme: Scheme, parts: Mapping[str, torch.Tensor]) -> QuantisedMatrix:
    """Make a matrix from the tensors of list_parts. Raises ValueError, which says what does not fit."""
    order = parts.get("g_idx", parts.get("weight_g_idx"))
    zeros = None
    if scheme.form in ("gptq", "awq"):
        words, zero_words = _words(parts["qweight"], "qweight"), _words(parts["qzeros"], "qzeros")
        if scheme.form == "gptq":
            codes, zeros = _unpacked(words, scheme.bits, 0).T, _unpacked(zero_words, scheme.bits, 1).T
            # The zero points were stored less 1, within the bits that there are.
            zeros = (zeros.short() + scheme.zero_offset) % (1 << scheme.bits)
        else:
            codes, zeros = (_in_order(_unpacked(each, scheme.bits, 1)).T for each in (words, zero_words))
        scales = parts["scales"].T
    elif scheme.form == "packed":
        num_out, num_in = _shape(parts["weight_shape"])
        codes = _unpacked(_words(parts["weight_packed"], "weight_packed"), scheme.bits, 1)[:num_out, :num_in]
        scales, middle = parts[scheme.scales], 1 << (scheme.bits - 1)  # signed numbers are stored from 0 on
        if scheme.has_zeros:
            zeros = _unpacked(_words(parts["weight_zero_point"], "weight_zero_point"), scheme.bits, 0)[:num_out]
        else:
            zeros = torch.full(tuple(scales.shape), middle, dtype=torch.uint8)
        if tuple(codes.shape) != (num_out, num_in):
            raise ValueError(f"weight_packed holds {tuple(codes.shape)} numbers, weight_shape says {(num_out, num_in)}")
    else:
        codes, scales, zeros = parts["weight"], parts[scheme.scales], parts.get("weight_zero_point")
        if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(f"weight is of {codes.dtype}, int8 and float8_e4m3fn are read")
    return _checked(scheme, codes, scales, zeros, order)


def _checked(
    scheme: Scheme, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None
) -> QuantisedMatrix:
    if codes.ndim != 2:
        raise ValueError(f"the weight has the shape {tuple(codes.shape)}")
    num_out, num_in = codes.shape
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(-1, 1) if scales.ndim == 1 else scales
    side_out, side_in = scheme.block or (1, scheme.group_size or num_in)
    expected = -(-num_out // side_out), -(-num_in // side_in)
    if tuple(scales.shape) not in (expected, (1, 1)):
        raise ValueError(f"{scheme.scales} has the shape {tuple(scales.shape)}, must have {expected}")
    if zeros is not None:
        zeros = zeros.reshape(scales.shape) if zeros.numel() == scales.numel() else zeros
        if zeros.shape != scales.shape:
            raise ValueError(f"zero points have the shape {tuple(zeros.shape)}, scales {tuple(scales.shape)}")
    if order is not None:
        order = order.long()
        if tuple(order.shape) != (num_in,) or not bool(((order >= 0) & (order < scales.shape[1])).all()):
            raise ValueError(f"g_idx must name one of {scales.shape[1]} groups for each of {num_in} inputs")
        if torch.equal(order, torch.arange(num_in) // side_in):
            order = None  # they lie in order
    return QuantisedMatrix(codes, scales.float(), zeros, order, (side_out, side_in))


def _words(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.dtype is not torch.int32 or tensor.ndim != 2:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, must be a matrix of int32")
    return tensor


def _unpacked(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """uint8, along dim 32 / bits times as many, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    found = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.ndim - dim - 1))) & ((1 << bits) - 1)
    return found.to(torch.uint8).flatten(dim, dim + 1)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """AWQ's numbers [n, out] in the order of the outputs."""
    return codes.unflatten(1, (-1, len(_AWQ_PLACES)))[:, :, list(_AWQ_PLACES)].flatten(1)


def _shape(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() != 2:
        raise ValueError(f"weight_shape has {tensor.numel()} numbers, must have 2")
    num_out, num_in = tensor.flatten().tolist()
    return int(num_out), int(num_in)


_MXFP4_PARTS = frozenset(("blocks", "scales"))
_MXFP4_BYTES = 16  # of a block
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _mxfp4_weight(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """bfloat16 [E, in, out] of blocks [E, out, in / 32, 16] and scales [E, out, in / 32]. Raises ValueError."""
    blocks, scales = parts["blocks"], parts["scales"]
    if blocks.dtype is not torch.uint8 or blocks.ndim != 4 or blocks.shape[3] != _MXFP4_BYTES:
        raise ValueError(
            f"blocks are {blocks.dtype} {tuple(blocks.shape)}, must be uint8 [experts, out, groups, {_MXFP4_BYTES}]"
        )
    if scales.dtype is not torch.uint8 or scales.shape != blocks.shape[:3]:
        raise ValueError(f"scales are {scales.dtype} {tuple(scales.shape)}, must be uint8 {tuple(blocks.shape[:3])}")
    if bool((scales == 255).any()):
        raise ValueError("a scale is not a number")
    values = torch.tensor((*_MXFP4_VALUES, *(-value for value in _MXFP4_VALUES)), dtype=torch.bfloat16)
    powers = torch.tensor([2.0 ** (scale - 127) for scale in range(255)], dtype=torch.bfloat16)
    experts, num_out, groups, _ = blocks.shape
    weight = torch.empty(experts, num_out, groups, _MXFP4_BYTES, 2, dtype=torch.bfloat16)
    for expert in range(experts):  # indices of one at a time: they take eight times what the numbers do
        weight[expert, ..., 0] = values[(blocks[expert] & 15).int()]
        weight[expert, ..., 1] = values[(blocks[expert] >> 4).int()]
        weight[expert] *= powers[scales[expert].int()][..., None, None]
    return weight.flatten(2).transpose(1, 2)


Tensors = Iterator[tuple[str, str, torch.Tensor]]


def restored(tensors: Tensors, scheme: Scheme) -> Tensors:
    """(file, name, tensor), where quantised weights are floats under their plain names, and all else is as it came.

    Raises:
        WeightsError: a tensor of a weight is missing, stored twice, or does not fit the others.
    """
    wanted = list_parts(scheme)
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for file, name, tensor in tensors:
        module, part = scheme.split_name(name)
        if part not in wanted or (part == "weight" and tensor.itemsize > 1):  # most weights are, some are not
            yield file, name, tensor
            continue
        held = waiting.setdefault(module, {})
        if part in held:
            raise WeightsError(file, f"tensor {name} is stored twice")
        held[part] = tensor
        if held.keys() == wanted:
            del waiting[module]
            try:
                weight = _mxfp4_weight(held) if scheme.form == "mxfp4" else make_matrix(scheme, held).dense()
            except ValueError as error:
                raise WeightsError(file, f"{module}: {error}") from None
            yield file, scheme.get_name(module), weight
    if waiting:
        module = min(waiting)
        missing = ", ".join(sorted(wanted - waiting[module].keys()))
        raise WeightsError(module, f"is stored without {missing}")
