"""KV specs: their ranges, the value that the service counts with, and the message again."""

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ...core.values.errors import InvalidField, NotImplementedYet
from ...core.values.kv_spec import KvSpec
from .checks import MAX_INT32, check_range, check_text

_ITEM_BYTES = {pb.KV_DTYPE_FLOAT16: 2, pb.KV_DTYPE_BFLOAT16: 2, pb.KV_DTYPE_FLOAT32: 4}


def kv_spec(spec: pb.KvSpec) -> KvSpec:
    """The spec with its defaults written out. Raises InvalidField, NotImplementedYet."""
    check_text("spec.model_id", spec.model_id, 256, shortest=1)
    check_text("spec.revision", spec.revision, 256)
    check_text("spec.adapter_id", spec.adapter_id, 256)
    check_range("spec.num_layers", spec.num_layers, 1, 1024)
    check_range("spec.num_kv_heads", spec.num_kv_heads, 1, 1024)
    check_range("spec.head_dim", spec.head_dim, 1, 4096)
    if spec.kv_dtype not in _ITEM_BYTES:
        raise InvalidField("kv_dtype is an element type of KvDtype", field="spec.kv_dtype")
    check_range("spec.block_size", spec.block_size, 1, 1024)
    if spec.layout != pb.KV_LAYOUT_BLOCK_MAJOR:
        raise InvalidField("KV_LAYOUT_BLOCK_MAJOR is the only layout", field="spec.layout")
    check_range("spec.sliding_window", spec.sliding_window, 0, MAX_INT32)
    check_text("spec.rope_parameters", spec.rope_parameters, 4096)
    check_text("spec.compute_dtype", spec.compute_dtype, 32)
    check_range("spec.tensor_parallel_size", spec.tensor_parallel_size, 0, MAX_INT32)
    if spec.tensor_parallel_size > 1:
        raise NotImplementedYet("this build serves one rank only", feature="tensor_parallel_size")
    whole = pb.KvSpec()
    whole.CopyFrom(spec)
    whole.tensor_parallel_size = 1
    return KvSpec(
        key=whole.SerializeToString(deterministic=True),
        model_id=spec.model_id,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        item_bytes=_ITEM_BYTES[spec.kv_dtype],
        block_size=spec.block_size,
    )


def kv_spec_message(spec: KvSpec) -> pb.KvSpec:
    """The message, with the fields of newer clients that it came with."""
    return pb.KvSpec.FromString(spec.key)
