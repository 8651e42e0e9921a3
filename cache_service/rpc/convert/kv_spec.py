"""KV specs: their ranges, the value that the service counts with, and the message again."""

import re
from collections.abc import Mapping, Sequence

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ...core.values.errors import InvalidField, NotImplementedYet
from ...core.values.kv_spec import KvSpec, LayerGroup
from .checks import MAX_INT32, check_range, check_text

_ITEM_BYTES: Mapping[int, int] = {pb.KV_DTYPE_FLOAT16: 2, pb.KV_DTYPE_BFLOAT16: 2, pb.KV_DTYPE_FLOAT32: 4}
ELEMENT_TYPES: Mapping[pb.KvDtype, str] = {
    pb.KV_DTYPE_FLOAT16: "float16",
    pb.KV_DTYPE_BFLOAT16: "bfloat16",
    pb.KV_DTYPE_FLOAT32: "float32",
    pb.KV_DTYPE_FLOAT8_E4M3: "fp8",
    pb.KV_DTYPE_INT8: "int8",
    pb.KV_DTYPE_INT4: "int4",
}
KV_DTYPES: Mapping[str, pb.KvDtype] = {name: number for number, name in ELEMENT_TYPES.items()}
_SCALED_BITS: Mapping[int, int] = {pb.KV_DTYPE_FLOAT8_E4M3: 8, pb.KV_DTYPE_INT8: 8, pb.KV_DTYPE_INT4: 4}
_PAGE_ALIGNMENT = 16
_MOST_GROUPS = 64
_MOST_KV_HEADS, _MOST_HEAD_DIM = 1024, 4096
_WINDOW_KINDS = (pb.LAYER_GROUP_KIND_SLIDING_WINDOW, pb.LAYER_GROUP_KIND_CHUNKED)
_SERVED_KINDS = (pb.LAYER_GROUP_KIND_FULL, *_WINDOW_KINDS, pb.LAYER_GROUP_KIND_RECURRENT)
_MOST_STATE_BYTES = 1 << 40
_MOST_CHECKPOINT_BLOCKS = 1 << 20
_MOST_PAGE_BYTES = 1 << 30
MOST_RANKS = 64
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OF_ELEMENTS = ("num_layers", "num_kv_heads", "head_dim", "kv_dtype")  # what an opaque page does not show


def kv_spec(spec: pb.KvSpec) -> KvSpec:
    """The spec with its defaults written out. Raises InvalidField, NotImplementedYet."""
    check_text("spec.model_id", spec.model_id, 256, shortest=1)
    check_text("spec.revision", spec.revision, 256)
    if spec.groups and spec.layout in (pb.KV_LAYOUT_BLOCK_MAJOR, pb.KV_LAYOUT_OPAQUE):
        raise InvalidField("groups are for KV_LAYOUT_GROUPED and KV_LAYOUT_SCALED", field="spec.groups")
    if spec.layout == pb.KV_LAYOUT_OPAQUE:
        _refuse_elements(spec, _OF_ELEMENTS)
        _check_page("spec.page", spec.page)
    elif spec.layout in (pb.KV_LAYOUT_BLOCK_MAJOR, pb.KV_LAYOUT_GROUPED):
        _check_elements(spec, _ITEM_BYTES)
    elif spec.layout == pb.KV_LAYOUT_SCALED:
        _check_elements(spec, _SCALED_BITS)
        step = 16 // _SCALED_BITS[spec.kv_dtype]
        if spec.head_dim % step:
            raise InvalidField(f"head_dim is a multiple of {step} for this kv_dtype", field="spec.head_dim", limit=step)
    else:
        text = "layout is KV_LAYOUT_BLOCK_MAJOR, KV_LAYOUT_GROUPED, KV_LAYOUT_SCALED or KV_LAYOUT_OPAQUE"
        raise InvalidField(text, field="spec.layout")
    check_range("spec.block_size", spec.block_size, 1, 1024)
    check_range("spec.sliding_window", spec.sliding_window, 0, MAX_INT32)
    check_text("spec.rope_parameters", spec.rope_parameters, 4096)
    check_text("spec.compute_dtype", spec.compute_dtype, 32)
    check_range("spec.tensor_parallel_size", spec.tensor_parallel_size, 0, MOST_RANKS)
    num_ranks = spec.tensor_parallel_size or 1
    whole = pb.KvSpec()
    whole.CopyFrom(spec)
    whole.tensor_parallel_size = num_ranks
    for group in whole.groups:
        if (group.num_kv_heads, group.head_dim) == (spec.num_kv_heads, spec.head_dim):
            group.num_kv_heads = group.head_dim = 0
    checked = KvSpec(
        key=whole.SerializeToString(deterministic=True),
        model_id=spec.model_id,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        item_bytes=1 if spec.layout == pb.KV_LAYOUT_SCALED else _ITEM_BYTES.get(spec.kv_dtype, 0),
        block_size=spec.block_size,
        page_bytes=spec.page.page_bytes,
        groups=_groups(whole) if spec.layout == pb.KV_LAYOUT_GROUPED else _tails(spec) if spec.groups else (),
        scaled_bits=_SCALED_BITS[spec.kv_dtype] if spec.layout == pb.KV_LAYOUT_SCALED else 0,
        num_ranks=num_ranks,
        element_type=ELEMENT_TYPES.get(spec.kv_dtype, ""),
    )
    _check_states(checked)
    return checked


def _check_states(spec: KvSpec) -> None:
    """Raises InvalidField where the states of a group are larger than a block."""
    most = max((group.state_bytes for group in spec.groups), default=0)
    if most > spec.block_bytes:
        least = -(-most * spec.block_size // spec.block_bytes)
        text = f"states of {most} bytes need blocks of {least} tokens or more, or groups of fewer layers"
        raise InvalidField(text, field="spec.groups.state_bytes", limit=least)


def _tails(spec: pb.KvSpec) -> tuple[LayerGroup, ...]:
    """All layers as they are stored, and each layer in one tail. Raises InvalidField."""
    check_range("spec.groups", len(spec.groups), 2, _MOST_GROUPS)
    stored, *tails = spec.groups
    if stored.kind != pb.LAYER_GROUP_KIND_FULL or any(tail.kind != pb.LAYER_GROUP_KIND_TAIL for tail in tails):
        text = "the first group is LAYER_GROUP_KIND_FULL, and those behind it are LAYER_GROUP_KIND_TAIL"
        raise InvalidField(text, field="spec.groups.kind")
    seen: list[int] = []
    for at, group in enumerate(spec.groups):
        check_range("spec.groups.window_tokens", group.window_tokens, int(at > 0), MAX_INT32 if at else 0)
        if at and group.kv_dtype not in _ITEM_BYTES:
            raise InvalidField("kv_dtype of a tail is one without a scale", field="spec.groups.kv_dtype")
        if not at and group.kv_dtype:
            raise InvalidField("kv_dtype of a group is that of a tail", field="spec.groups.kv_dtype")
        if not group.layer_idx or list(group.layer_idx) != sorted(set(group.layer_idx)):
            raise InvalidField("layer_idx are the group's layers, ascending", field="spec.groups.layer_idx")
        _refuse_states(group)
        _refuse_heads(group, "KV_LAYOUT_GROUPED")
        _refuse_page(group, "KV_LAYOUT_GROUPED")
        seen += group.layer_idx if at else ()
    every = list(range(spec.num_layers))
    if list(stored.layer_idx) != every or sorted(seen) != every:
        text = "the first group has all layers, and each is in one tail"
        raise InvalidField(text, field="spec.groups.layer_idx", limit=spec.num_layers - 1)
    return tuple(
        LayerGroup(
            tuple(group.layer_idx),
            group.window_tokens,
            at > 0,
            _ITEM_BYTES.get(group.kv_dtype, 0),
            ELEMENT_TYPES.get(group.kv_dtype, ""),
        )
        for at, group in enumerate(spec.groups)
    )


def _refuse_states(group: pb.LayerGroup) -> None:
    """Raises InvalidField where a group without states names some."""
    if group.state_bytes or group.checkpoint_blocks:
        field = "spec.groups.state_bytes" if group.state_bytes else "spec.groups.checkpoint_blocks"
        raise InvalidField("states are of LAYER_GROUP_KIND_RECURRENT", field=field, limit=0)


def _refuse_heads(group: pb.LayerGroup, of: str) -> None:
    """Raises InvalidField where a group has heads of its own."""
    if group.num_kv_heads or group.head_dim:
        field = "spec.groups.num_kv_heads" if group.num_kv_heads else "spec.groups.head_dim"
        raise InvalidField(f"heads of a group are for {of}", field=field, limit=0)


def _refuse_page(group: pb.LayerGroup, of: str) -> None:
    """Raises InvalidField where the blocks of a group are opaque pages."""
    if group.HasField("page"):
        raise InvalidField(f"a page of a group is for {of}", field="spec.groups.page")


def _groups(spec: pb.KvSpec) -> tuple[LayerGroup, ...]:
    """Raises InvalidField, NotImplementedYet."""
    check_range("spec.groups", len(spec.groups), 1, _MOST_GROUPS)
    seen: list[int] = []
    for group in spec.groups:
        if group.kind not in _SERVED_KINDS:
            if group.kind == pb.LAYER_GROUP_KIND_LATENT:
                name = pb.LayerGroupKind.Name(group.kind)
                raise NotImplementedYet(f"{name} is not served by this build", feature="layer_group_kind")
            raise InvalidField("kind is one of LayerGroupKind", field="spec.groups.kind")
        if group.kv_dtype:
            raise InvalidField("kv_dtype of a group is for KV_LAYOUT_SCALED", field="spec.groups.kv_dtype")
        if group.kind == pb.LAYER_GROUP_KIND_RECURRENT:
            check_range("spec.groups.state_bytes", group.state_bytes, 1, _MOST_STATE_BYTES)
            check_range("spec.groups.checkpoint_blocks", group.checkpoint_blocks, 1, _MOST_CHECKPOINT_BLOCKS)
            _refuse_heads(group, "groups with K and V")
            _refuse_page(group, "groups without states")
        else:
            _refuse_states(group)
        if group.HasField("page"):
            _refuse_heads(group, "groups without a page")
            _check_page("spec.groups.page", group.page)
        elif group.num_kv_heads or group.head_dim:
            check_range("spec.groups.num_kv_heads", group.num_kv_heads, 1, _MOST_KV_HEADS)
            check_range("spec.groups.head_dim", group.head_dim, 1, _MOST_HEAD_DIM)
        has_window = group.kind in _WINDOW_KINDS
        check_range("spec.groups.window_tokens", group.window_tokens, int(has_window), MAX_INT32 if has_window else 0)
        if not group.layer_idx or list(group.layer_idx) != sorted(set(group.layer_idx)):
            raise InvalidField("layer_idx are the group's layers, ascending", field="spec.groups.layer_idx")
        seen += group.layer_idx
    if sorted(seen) != list(range(spec.num_layers)):
        raise InvalidField("each layer is in one group", field="spec.groups.layer_idx", limit=spec.num_layers - 1)
    if spec.groups[0].kind != pb.LAYER_GROUP_KIND_FULL:
        raise InvalidField("the first group is LAYER_GROUP_KIND_FULL", field="spec.groups.kind")
    return tuple(
        LayerGroup(
            tuple(group.layer_idx),
            group.window_tokens,
            is_chunked=group.kind == pb.LAYER_GROUP_KIND_CHUNKED,
            state_bytes=group.state_bytes,
            checkpoint_blocks=group.checkpoint_blocks,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            page_bytes=group.page.page_bytes,
        )
        for group in spec.groups
    )


def to_kv_dtype(element_type: str) -> pb.KvDtype:
    """The number of KvSpec.element_type, or of a format below the device; UNSPECIFIED where it is empty."""
    return KV_DTYPES[element_type] if element_type else pb.KV_DTYPE_UNSPECIFIED


def kv_spec_message(spec: KvSpec) -> pb.KvSpec:
    """The message, with the fields of newer clients that it came with."""
    return pb.KvSpec.FromString(spec.key)


def _check_elements(spec: pb.KvSpec, dtypes: Mapping[int, int]) -> None:
    """dtypes: those of the layout. A spec has no elements where no group has any."""
    check_range("spec.num_layers", spec.num_layers, 1, 1024)
    if spec.HasField("page"):
        raise InvalidField("page is for KV_LAYOUT_OPAQUE", field="spec.page")
    have_none = [group.HasField("page") or group.kind == pb.LAYER_GROUP_KIND_RECURRENT for group in spec.groups]
    if spec.layout == pb.KV_LAYOUT_GROUPED and have_none and all(have_none):
        _refuse_elements(spec, _OF_ELEMENTS[1:])
        return
    check_range("spec.num_kv_heads", spec.num_kv_heads, 1, _MOST_KV_HEADS)
    check_range("spec.head_dim", spec.head_dim, 1, _MOST_HEAD_DIM)
    if spec.kv_dtype not in dtypes:
        raise InvalidField("kv_dtype is an element type of KvDtype that goes with the layout", field="spec.kv_dtype")


def _refuse_elements(spec: pb.KvSpec, names: Sequence[str]) -> None:
    """One page, one meaning: what the digest stands for is not said a second time."""
    for name in names:
        if getattr(spec, name):
            raise InvalidField(f"{name} is not told of opaque pages: it belongs into the digest", field=f"spec.{name}")


def _check_page(field: str, page: pb.PageLayout) -> None:
    check_range(f"{field}.page_bytes", page.page_bytes, _PAGE_ALIGNMENT, _MOST_PAGE_BYTES)
    if page.page_bytes % _PAGE_ALIGNMENT:
        text = f"page_bytes is a multiple of {_PAGE_ALIGNMENT}"
        raise InvalidField(text, field=f"{field}.page_bytes", limit=_PAGE_ALIGNMENT)
    if not _SHA256.fullmatch(page.digest):
        raise InvalidField("digest is a SHA-256 in lower-case hex", field=f"{field}.digest", limit=64)
