"""restored: the tensors of a quantised checkpoint with each weight as one tensor again.

Tensors of one weight may come in any order and from several files; those that are there wait for the others.
"""

from collections.abc import Iterator

import torch

from ..checkpoint.errors import WeightsError
from . import mxfp4
from .matrix import matrix_of, parts_of
from .scheme import Scheme

Tensors = Iterator[tuple[str, str, torch.Tensor]]


def restored(tensors: Tensors, scheme: Scheme) -> Tensors:
    """(file, name, tensor), where quantised weights are floats under their plain names, and all else is as it came.

    Raises:
        WeightsError: a tensor of a weight is missing, stored twice, or does not fit the others.
    """
    wanted = parts_of(scheme)
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
                weight = mxfp4.weight_of(held) if scheme.form == "mxfp4" else matrix_of(scheme, held).dense()
            except ValueError as error:
                raise WeightsError(file, f"{module}: {error}") from None
            yield file, scheme.name_of(module), weight
    if waiting:
        module = min(waiting)
        missing = ", ".join(sorted(wanted - waiting[module].keys()))
        raise WeightsError(module, f"is stored without {missing}")
