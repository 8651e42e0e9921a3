"""KV specs: their ranges, how two are compared, and what a block of one weighs."""

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ...core.values.errors import InvalidField, NotImplementedYet
from .sequences import check_range, check_text

_ITEM_BYTES = {pb.KV_DTYPE_FLOAT16: 2, pb.KV_DTYPE_BFLOAT16: 2, pb.KV_DTYPE_FLOAT32: 4}


def checked_spec(spec: pb.KvSpec) -> pb.KvSpec:
    """The spec with its defaults written out. Raises InvalidField, NotImplementedYet."""
    check_text("spec.model_id", spec.model_id, 256, shortest=1)
    check_text("spec.revision", spec.revision, 256)
    check_text("spec.adapter_id", spec.adapter_id, 256)
    check_range("spec.num_layers", spec.num_layers, 1, 1024)
    check_range("spec.num_kv_heads", spec.num_kv_heads, 1, 1024)
    check_range("spec.head_dim", spec.head_dim, 1, 4096)
    if spec.kv_dtype not in _ITEM_BYTES:
        raise InvalidField("an element type of KvDtype is wanted", field="spec.kv_dtype")
    check_range("spec.block_size", spec.block_size, 1, 1024)
    if spec.layout != pb.KV_LAYOUT_BLOCK_MAJOR:
        raise InvalidField("KV_LAYOUT_BLOCK_MAJOR is the only layout", field="spec.layout")
    check_range("spec.sliding_window", spec.sliding_window, 0, 2**31 - 1)
    check_text("spec.rope_parameters", spec.rope_parameters, 4096)
    check_text("spec.compute_dtype", spec.compute_dtype, 32)
    check_range("spec.tensor_parallel_size", spec.tensor_parallel_size, 0, 2**31 - 1)
    if spec.tensor_parallel_size > 1:
        raise NotImplementedYet("one rank is all that this build serves", feature="tensor_parallel_size")
    checked = pb.KvSpec()
    checked.CopyFrom(spec)
    checked.tensor_parallel_size = 1
    return checked


def spec_key(spec: pb.KvSpec) -> bytes:
    """Equal exactly for specs that may share KV, fields of newer clients included."""
    return spec.SerializeToString(deterministic=True)


def token_bytes(spec: pb.KvSpec) -> int:
    """Bytes of K, or of V, of one token in one layer."""
    return spec.num_kv_heads * spec.head_dim * _ITEM_BYTES[spec.kv_dtype]


def block_bytes(spec: pb.KvSpec) -> int:
    """Bytes of one block over all layers, K and V."""
    return spec.num_layers * 2 * spec.block_size * token_bytes(spec)
