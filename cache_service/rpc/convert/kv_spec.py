"""KV specs: their ranges, the value that the service counts with, and the message again."""

import re

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ...core.values.errors import InvalidField, NotImplementedYet
from ...core.values.kv_spec import KvSpec
from .checks import MAX_INT32, check_range, check_text

_ITEM_BYTES = {pb.KV_DTYPE_FLOAT16: 2, pb.KV_DTYPE_BFLOAT16: 2, pb.KV_DTYPE_FLOAT32: 4}
_PAGE_ALIGNMENT = 16
_MOST_PAGE_BYTES = 1 << 30
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OF_ELEMENTS = ("num_layers", "num_kv_heads", "head_dim", "kv_dtype")  # what an opaque page does not tell


def kv_spec(spec: pb.KvSpec) -> KvSpec:
    """The spec with its defaults written out. Raises InvalidField, NotImplementedYet."""
    check_text("spec.model_id", spec.model_id, 256, shortest=1)
    check_text("spec.revision", spec.revision, 256)
    check_text("spec.adapter_id", spec.adapter_id, 256)
    if spec.layout == pb.KV_LAYOUT_OPAQUE:
        _check_page(spec)
    elif spec.layout == pb.KV_LAYOUT_BLOCK_MAJOR:
        _check_elements(spec)
    else:
        raise InvalidField("layout is KV_LAYOUT_BLOCK_MAJOR or KV_LAYOUT_OPAQUE", field="spec.layout")
    check_range("spec.block_size", spec.block_size, 1, 1024)
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
        item_bytes=_ITEM_BYTES.get(spec.kv_dtype, 0),
        block_size=spec.block_size,
        page_bytes=spec.page.page_bytes,
    )


def kv_spec_message(spec: KvSpec) -> pb.KvSpec:
    """The message, with the fields of newer clients that it came with."""
    return pb.KvSpec.FromString(spec.key)


def _check_elements(spec: pb.KvSpec) -> None:
    check_range("spec.num_layers", spec.num_layers, 1, 1024)
    check_range("spec.num_kv_heads", spec.num_kv_heads, 1, 1024)
    check_range("spec.head_dim", spec.head_dim, 1, 4096)
    if spec.kv_dtype not in _ITEM_BYTES:
        raise InvalidField("kv_dtype is an element type of KvDtype", field="spec.kv_dtype")
    if spec.HasField("page"):
        raise InvalidField("page is for KV_LAYOUT_OPAQUE", field="spec.page")


def _check_page(spec: pb.KvSpec) -> None:
    """One page, one meaning: what the digest stands for is not said a second time."""
    for name in _OF_ELEMENTS:
        if getattr(spec, name):
            raise InvalidField(f"{name} is not told of opaque pages: it belongs into the digest", field=f"spec.{name}")
    check_range("spec.page.page_bytes", spec.page.page_bytes, _PAGE_ALIGNMENT, _MOST_PAGE_BYTES)
    if spec.page.page_bytes % _PAGE_ALIGNMENT:
        text = f"page_bytes is a multiple of {_PAGE_ALIGNMENT}"
        raise InvalidField(text, field="spec.page.page_bytes", limit=_PAGE_ALIGNMENT)
    if not _SHA256.fullmatch(spec.page.digest):
        raise InvalidField("digest is a SHA-256 in lower-case hex", field="spec.page.digest", limit=64)
