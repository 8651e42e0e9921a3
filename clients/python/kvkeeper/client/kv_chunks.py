"""K and V as arrays on this side, as bounded chunks on the wire (ReadKv and WriteKv, for tests and tools).

numpy has no bfloat16: its bits are passed as uint16.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import KvkeeperError

_CHUNK_BYTES = 64 << 10  # of K and of V each: with its frame well below the limit of a control message

_DTYPES: dict[int, np.dtype[Any]] = {
    pb.KV_DTYPE_FLOAT16: np.dtype("<f2"),
    pb.KV_DTYPE_BFLOAT16: np.dtype("<u2"),
    pb.KV_DTYPE_FLOAT32: np.dtype("<f4"),
}


@dataclass(frozen=True, slots=True)
class KvTokens:
    """K and V of a run of tokens, each [num_layers, num_tokens, num_kv_heads, head_dim] in the spec's dtype or that asked for.

    The layers are of one shape: where groups have heads of their own, others are read and written in another call.

    stored_kv_dtype: of what was read, the type that it is stored in; of what is written, nothing.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    stored_kv_dtype: "pb.KvDtype" = pb.KV_DTYPE_UNSPECIFIED


def select_layers(spec: pb.KvSpec, layers: Sequence[int]) -> tuple[list[int], tuple[int, int]]:
    """These layers, or all that have K and V outside of opaque pages, and the [num_kv_heads, head_dim] that all of them have.

    Raises ValueError where they have different ones.
    """
    groups = {layer_idx: group for group in spec.groups for layer_idx in group.layer_idx}
    others = {idx for idx, group in groups.items() if group.kind == pb.LAYER_GROUP_KIND_RECURRENT or group.HasField("page")}
    layer_idxs = list(layers) or [layer_idx for layer_idx in range(spec.num_layers) if layer_idx not in others]
    heads = spec.num_kv_heads, spec.head_dim
    found: dict[tuple[int, int], int] = {}
    for layer_idx in layer_idxs:
        group = groups.get(layer_idx, pb.LayerGroup())
        found.setdefault((group.num_kv_heads, group.head_dim) if group.num_kv_heads else heads, layer_idx)
    if len(found) > 1:
        one, other, *_ = found.values()
        raise ValueError(f"layers {one} and {other} have K and V of different shapes: name layers of one shape")
    return layer_idxs, next(iter(found), heads)


def split(
    spec: pb.KvSpec, head: dict[str, Any], first_token_idx: int, kv: KvTokens, layers: Sequence[int]
) -> Iterator[pb.WriteKvRequest]:
    """The chunks of a WriteKv; head holds the fields that all of them carry, the type of K and V among them.

    Raises ValueError for another shape or dtype, for layers of different shapes, and for K and V in a type that has scales; for
    opaque pages, the error that the service would return.
    """
    if spec.layout == pb.KV_LAYOUT_OPAQUE:
        text = "the blocks of this pool are opaque pages, which have no K and V of single tokens"
        raise KvkeeperError(grpc.StatusCode.FAILED_PRECONDITION, "OPAQUE_PAGES", text)
    layer_idxs, row = select_layers(spec, layers)
    kv_dtype = head.get("kv_dtype") or spec.kv_dtype
    if kv_dtype not in _DTYPES:
        raise ValueError("K and V are given in a type without a scale: say in kv_dtype in which")
    dtype = _DTYPES[kv_dtype]
    for array in (kv.keys, kv.values):
        if array.shape != (len(layer_idxs), kv.keys.shape[1], *row) or array.dtype != dtype:
            raise ValueError(
                f"K and V must be [{len(layer_idxs)}, num_tokens, {row[0]}, {row[1]}] of {dtype},"
                f" got {list(array.shape)} of {array.dtype}"
            )
    num_tokens = kv.keys.shape[1]
    chunk_len = max(1, _CHUNK_BYTES // (row[0] * row[1] * dtype.itemsize))
    for position, layer_idx in enumerate(layer_idxs):
        for start in range(0, num_tokens, chunk_len):
            yield pb.WriteKvRequest(
                **head,
                layer_idx=layer_idx,
                first_token_idx=first_token_idx + start,
                key=kv.keys[position, start : start + chunk_len].tobytes(),
                value=kv.values[position, start : start + chunk_len].tobytes(),
            )


def join(spec: pb.KvSpec, layers: Sequence[int], chunks: Iterable[pb.ReadKvResponse]) -> KvTokens:
    """The arrays of a ReadKv whose chunks come layer by layer, tokens ascending."""
    layer_idxs, row = select_layers(spec, layers)
    keys: dict[int, list[bytes]] = {layer_idx: [] for layer_idx in layer_idxs}
    values: dict[int, list[bytes]] = {layer_idx: [] for layer_idx in layer_idxs}
    kv_dtype, stored = spec.kv_dtype, spec.kv_dtype
    for chunk in chunks:
        kv_dtype, stored = chunk.kv_dtype or spec.kv_dtype, chunk.stored_kv_dtype or spec.kv_dtype
        keys[chunk.layer_idx].append(chunk.key)
        values[chunk.layer_idx].append(chunk.value)
    shape = (len(layer_idxs), -1, *row)

    def array(parts: dict[int, list[bytes]]) -> npt.NDArray[Any]:
        data = b"".join(b"".join(parts[layer_idx]) for layer_idx in layer_idxs)
        return np.frombuffer(data, _DTYPES.get(kv_dtype, np.dtype(np.uint8))).reshape(shape)

    return KvTokens(array(keys), array(values), stored)
