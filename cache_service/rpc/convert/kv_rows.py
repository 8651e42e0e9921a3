"""KvRows: K and V of single tokens in the blocks of a pool, as the bytes of a type that the caller chose.

Owns where in a block a token's K and V are: in blocks of plain numbers, in blocks with a scale for each token and head, and in
pages of a tail. Numbers are converted only where the types differ. Knows no sequence and no session.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...core.values.kv_spec import KvSpec
from ...core.values.types import Int32Array
from ...memory.arena import Arena
from ...memory.kv_numbers import ITEM_BYTES, SCALE_BYTES, ByteArray, Float32Array, dequantise, quantise, to_elements, to_numbers

_SIDES = 0, 1  # K and V


class Run(NamedTuple):
    """Tokens of one block: the block's first byte, the first of them there, how many, and how many come before them."""

    block: int
    offset: int
    num_tokens: int
    num_before: int


class KvRows:
    """The K and V of one pool as wire_type: float16, bfloat16 or float32; without scales also the type that the pool stores."""

    def __init__(self, spec: KvSpec, arena: Arena, wire_type: str) -> None:
        self._spec, self._arena = spec, arena
        self._wire_item_bytes = ITEM_BYTES.get(wire_type, spec.item_bytes)
        self.wire_type = wire_type

    def wire_bytes(self, layer_idx: int) -> int:
        """Bytes of K, or of V, of a token in a layer."""
        return self._spec.layer_heads(layer_idx).num_elements * self._wire_item_bytes

    def read(self, table: Int32Array, layer_idx: int, first_token_idx: int, num_tokens: int) -> tuple[bytes, bytes]:
        """K and V, [num_tokens, wire_bytes] each, of the layer whose group has this table."""
        runs = list(self._runs(table, first_token_idx, num_tokens))
        key, value = (b"".join(self._read_run(run, layer_idx, side) for run in runs) for side in _SIDES)
        return key, value

    def write(self, tables: Sequence[Int32Array], layer_idx: int, first_token_idx: int, sides: tuple[bytes, bytes]) -> None:
        """Writes K and V, [num_tokens, wire_bytes] each.

        tables: of the layer's group, and behind it those of all groups but the first. Of a tail's table the entries that are
        0 are left out.
        """
        wire_bytes = self.wire_bytes(layer_idx)
        num_tokens = len(sides[0]) // wire_bytes
        for run in self._runs(tables[0], first_token_idx, num_tokens):
            for side in _SIDES:
                self._write_run(run, layer_idx, side, _part(sides[side], run, wire_bytes))
        for group, table in zip(self._spec.groups[1:], tables[1:], strict=True):
            if not group.is_tail or layer_idx not in group.layers:
                continue
            row_bytes = self._spec.layer_heads(layer_idx).num_elements * group.tail_item_bytes
            place = group.layers.index(layer_idx)
            for run in self._runs(table, first_token_idx, num_tokens):
                for side in _SIDES if run.block else ():
                    data = self._converted(_part(sides[side], run, wire_bytes), self.wire_type, group.tail_type)
                    self._arena.write(self._plane(run, place, side, row_bytes) + run.offset * row_bytes, data)

    def _read_run(self, run: Run, layer_idx: int, side: int) -> bytes:
        spec = self._spec
        if not spec.scaled_bits:
            data = self._arena.read(self._row(run, layer_idx, side), run.num_tokens * spec.token_bytes(layer_idx))
            return self._converted(data, spec.element_type, self.wire_type)
        first_element, first_scale = self._scaled(run, layer_idx, side)
        elements = _bytes(self._arena.read(first_element, run.num_tokens * self._stored_bytes))
        scales = np.frombuffer(self._arena.read(first_scale, run.num_tokens * spec.num_kv_heads * SCALE_BYTES), "<u2")
        heads = elements.reshape(run.num_tokens, spec.num_kv_heads, -1), scales.reshape(run.num_tokens, spec.num_kv_heads)
        return to_elements(dequantise(*heads, spec.element_type), self.wire_type).tobytes()

    def _write_run(self, run: Run, layer_idx: int, side: int, data: bytes) -> None:
        spec = self._spec
        if not spec.scaled_bits:
            self._arena.write(self._row(run, layer_idx, side), self._converted(data, self.wire_type, spec.element_type))
            return
        elements, scales = quantise(self._numbers(data).reshape(run.num_tokens, spec.num_kv_heads, -1), spec.element_type)
        first_element, first_scale = self._scaled(run, layer_idx, side)
        self._arena.write(first_element, elements.tobytes())
        self._arena.write(first_scale, scales.astype("<u2").tobytes())

    @property
    def _stored_bytes(self) -> int:
        """The bytes that the elements of K, or of V, take for a token with scales."""
        return self._spec.num_kv_heads * self._spec.head_dim * self._spec.scaled_bits // 8

    def _row(self, run: Run, layer_idx: int, side: int) -> int:
        """The first byte of a run's K, or V, in a block of numbers."""
        _, place = self._spec.find_place(layer_idx)
        row_bytes = self._spec.token_bytes(layer_idx)
        return self._plane(run, place, side, row_bytes) + run.offset * row_bytes

    def _scaled(self, run: Run, layer_idx: int, side: int) -> tuple[int, int]:
        """The first bytes of a run's elements and of its scales: a side has the elements of all its tokens first."""
        plane = self._plane(run, layer_idx, side, self._spec.token_bytes(layer_idx))
        scales = plane + self._spec.block_size * self._stored_bytes
        return plane + run.offset * self._stored_bytes, scales + run.offset * self._spec.num_kv_heads * SCALE_BYTES

    def _plane(self, run: Run, place: int, side: int, row_bytes: int) -> int:
        """The first byte of K, or of V, of a layer in a block."""
        return run.block + (2 * place + side) * self._spec.block_size * row_bytes

    def _numbers(self, data: bytes) -> Float32Array:
        return to_numbers(_bytes(data), self.wire_type)

    @staticmethod
    def _converted(data: bytes, from_type: str, to_type: str) -> bytes:
        return data if from_type == to_type else to_elements(to_numbers(_bytes(data), from_type), to_type).tobytes()

    def _runs(self, table: Int32Array, first_token_idx: int, num_tokens: int) -> Iterator[Run]:
        """A run of tokens, block by block. A run of block 0 is nowhere."""
        size, end = self._spec.block_size, first_token_idx + num_tokens
        token_idx = first_token_idx
        while token_idx < end:
            block_idx, offset = divmod(token_idx, size)
            count = min(size - offset, end - token_idx)
            yield Run(int(table[block_idx]) * self._spec.block_bytes, offset, count, token_idx - first_token_idx)
            token_idx += count


def _part(data: bytes, run: Run, row_bytes: int) -> bytes:
    return data[run.num_before * row_bytes : (run.num_before + run.num_tokens) * row_bytes]


def _bytes(data: bytes) -> ByteArray:
    return np.frombuffer(data, np.uint8)
