"""Rows of K and V in blocks of groups whose heads are drawn: no two share a byte, and all lie where the layout says."""

from typing import Any

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.cache_service.rpc.convert.kv_rows import KvRows
from kvkeeper.cache_service.rpc.convert.kv_spec import kv_spec, kv_spec_message

ITEM_BYTES = {pb.KV_DTYPE_FLOAT16: 2, pb.KV_DTYPE_BFLOAT16: 2, pb.KV_DTYPE_FLOAT32: 4}
KINDS = [pb.LAYER_GROUP_KIND_FULL, pb.LAYER_GROUP_KIND_SLIDING_WINDOW, pb.LAYER_GROUP_KIND_CHUNKED]


def draw_spec(rng: np.random.Generator) -> pb.KvSpec:
    """1 to 5 groups of 1 to 4 layers each, in any order; each with heads of its own, with a page, or with the spec's heads."""
    counts = rng.integers(1, 5, rng.integers(1, 6))
    layers = np.split(rng.permutation(counts.sum()), counts.cumsum()[:-1])
    groups = []
    for at, of_group in enumerate(layers):
        kind = KINDS[rng.integers(3)] if at else KINDS[0]
        window = int(rng.integers(1, 40)) if kind != KINDS[0] else 0
        heads: dict[str, Any] = {}
        if at and rng.random() < 0.2:
            heads = {"page": pb.PageLayout(page_bytes=16 * int(rng.integers(1, 200)), digest="0" * 64)}
        elif rng.random() < 0.7:
            heads = {"num_kv_heads": int(rng.integers(1, 6)), "head_dim": int(rng.integers(1, 33))}
        groups.append(pb.LayerGroup(kind=kind, layer_idx=sorted(of_group.tolist()), window_tokens=window, **heads))
    return pb.KvSpec(
        model_id="drawn",
        num_layers=int(counts.sum()),
        num_kv_heads=int(rng.integers(1, 6)),
        head_dim=int(rng.integers(1, 33)),
        kv_dtype=list(ITEM_BYTES)[rng.integers(3)],
        block_size=int(rng.integers(1, 8)),
        layout=pb.KV_LAYOUT_GROUPED,
        groups=groups,
    )


def heads_of(spec: pb.KvSpec, group: pb.LayerGroup) -> tuple[int, int]:
    return group.num_kv_heads or spec.num_kv_heads, group.head_dim or spec.head_dim


@pytest.mark.parametrize("seed", range(60))
def test_every_slot_of_every_group_is_its_own_and_where_the_layout_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    message = draw_spec(rng)
    spec, item_bytes, size = kv_spec(message), ITEM_BYTES[message.kv_dtype], message.block_size
    with_rows = [at for at, group in enumerate(message.groups) if not group.HasField("page")]
    sizes = [2 * len(group.layer_idx) * size * np.prod(heads_of(message, group)) * item_bytes for group in message.groups]
    largest = int(max(sizes[at] if at in with_rows else group.page.page_bytes for at, group in enumerate(message.groups)))
    has_pages = len(with_rows) < len(message.groups)  # which are aligned in every block
    assert spec.block_bytes == (-(-largest // 16) * 16 if has_pages else largest)
    assert kv_spec(kv_spec_message(spec)) == spec
    length, num_blocks = int(rng.integers(1, 4 * size)), 4 * len(message.groups) + 1
    tables = rng.permutation(np.arange(1, num_blocks, dtype=np.int32)).reshape(len(message.groups), 4)
    arena = SharedMemoryArena(num_blocks * spec.block_bytes)
    rows, written = KvRows(spec, arena, spec.element_type), {}
    order = rng.permutation([layer for group in message.groups for layer in group.layer_idx]).tolist()
    for layer_idx in filter(spec.has_rows, order):
        group_idx, _ = spec.find_place(layer_idx)
        row_bytes = int(np.prod(heads_of(message, message.groups[group_idx]))) * item_bytes
        assert rows.wire_bytes(layer_idx) == row_bytes
        written[layer_idx] = rng.integers(1, 256, (2, length, row_bytes), np.uint8)
        cut = int(rng.integers(0, length + 1))  # in two calls
        for first, part in ((0, written[layer_idx][:, :cut]), (cut, written[layer_idx][:, cut:])):
            if part.shape[1]:
                others = tables[1:] if len(tables) > 1 else ()
                rows.write([tables[group_idx], *others], layer_idx, first, (part[0].tobytes(), part[1].tobytes()))
    blocks, num_written = arena.blocks(num_blocks, spec.block_bytes), 0
    assert sorted(written) == sorted(layer for at in with_rows for layer in message.groups[at].layer_idx)
    for table, group in zip(tables[with_rows], [message.groups[at] for at in with_rows], strict=True):
        row_bytes = int(np.prod(heads_of(message, group))) * item_bytes
        num_layers = len(group.layer_idx)
        front = blocks[table, : num_layers * 2 * size * row_bytes].reshape(4, num_layers, 2, size, row_bytes)
        found = front.transpose(1, 2, 0, 3, 4).reshape(num_layers, 2, 4 * size, row_bytes)[:, :, :length]
        for place, layer_idx in enumerate(group.layer_idx):
            np.testing.assert_array_equal(found[place], written[layer_idx])
            key, value = rows.read(table, layer_idx, 0, length)
            assert (key, value) == tuple(side.tobytes() for side in written[layer_idx])
            num_written += 2 * length * row_bytes
    assert np.count_nonzero(blocks) == num_written, "nothing lies elsewhere"
    arena.close()
