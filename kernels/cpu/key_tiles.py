"""Scores of keys, and sums of their values, as vector instructions: keys and values are read where they are.

A tile of keys is a list of addresses, so that a key may lie anywhere. A score is a dot product along the head: LANES keys make
LANES vectors of partial sums, which are folded into one vector of scores. What a query gets does not depend on the queries
beside it. See tiles.py for the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .kernel_parts import helper
from .tiles import BFLOAT16, INT, LANES, LONG, MOST_ROWS, MOST_VECTORS, Floats, call_outlined, emit_by_size

_FMA: Final = f"llvm.fma.v{LANES}f32"


def _at(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


class Loop:
    """Counts a phi from 0 to a number, by steps; values are carried along. There may be no round at all."""

    def __init__(self, builder: Any, count: Any, step: int, carried: Sequence[Any]) -> None:
        self._builder, self._step = builder, step
        before = builder.block
        head, self._body, self._after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        self._head, self.idx = head, builder.phi(LONG)
        self.idx.add_incoming(LONG(0), before)
        self.values = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.values, carried, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", self.idx, count), self._body, self._after)
        builder.position_at_end(self._body)

    def end(self, carried: Sequence[Any] = ()) -> list[Any]:
        """Close it; the values as they are behind it."""
        self.idx.add_incoming(self._builder.add(self.idx, LONG(self._step)), self._builder.block)
        for phi, value in zip(self.values, carried, strict=True):
            phi.add_incoming(value, self._builder.block)
        self._builder.branch(self._head)
        self._builder.position_at_end(self._after)
        return list(self.values)


def _make_mask(builder: Any, rest: Any) -> Any:
    """The first `rest` of a vector's lanes."""
    lanes = ir.VectorType(INT, LANES)
    none = ir.Constant(lanes, ir.Undefined)
    spread = builder.shuffle_vector(
        builder.insert_element(none, builder.trunc(rest, INT), INT(0)), none, ir.Constant(lanes, [0] * LANES)
    )
    return builder.icmp_signed("<", ir.Constant(lanes, list(range(LANES))), spread)


def _load_some(builder: Any, vectors: Floats, address: Any, mask: Any, element: Any) -> Any:
    """A vector of elements, 0 where the mask has none; these are not read."""
    of = ir.VectorType(element, LANES)
    name, zero = f"llvm.masked.load.v{LANES}i{element.width}.p0", ir.Constant(of, [0] * LANES)
    return vectors.call(name, of, _at(builder, address, of), INT(2), mask, zero)


def _fold(builder: Any, sums: list[Any]) -> Any:
    """One vector with the sum of each of LANES vectors in its own lane.

    Lanes are added within quarters of a wide vector first, where one instruction takes lanes of two vectors.
    """
    lanes = ir.VectorType(INT, LANES)
    while len(sums) > 1:
        is_within = len(sums) * 4 > LANES
        size = 1 if is_within else 4
        folded = []
        for first, second in zip(sums[::2], sums[1::2], strict=True):
            halves = [builder.shuffle_vector(first, second, ir.Constant(lanes, each)) for each in _halves(size, is_within)]
            folded.append(builder.fadd(*halves))
        sums = folded
    return sums[0]


def _halves(size: int, is_within: bool) -> Iterator[list[int]]:
    """The even, and the odd, of runs of `size` lanes of two vectors, in order; if is_within, four lanes by four of both."""
    for odd in (0, 1):
        runs = [run for run in range(2 * LANES // size) if run % 2 == odd]
        if is_within:
            runs.sort(key=lambda run: (run % LANES // 4, run // LANES))
        yield [run * size + lane for run in runs for lane in range(size)]


def _emit_scores(builder: Any, arguments: Sequence[Any], kind: str) -> None:
    queries_at, offset, num_queries, list_at, num_words, out_at, out_stride = arguments
    vectors = Floats(builder, kind)
    keys = [builder.load(_at(builder, builder.add(list_at, LONG(8 * key)), LONG)) for key in range(LANES)]
    num_whole = builder.and_(num_words, LONG(-LANES))
    mask, has_rest = _make_mask(builder, builder.sub(num_words, num_whole)), builder.icmp_signed("<", num_whole, num_words)
    each = Loop(builder, num_queries, 1, [])
    query_at = builder.load(_at(builder, builder.add(queries_at, builder.shl(each.idx, LONG(3))), LONG))
    query_at, to = builder.add(query_at, offset), builder.add(out_at, builder.mul(out_stride, each.idx))

    def add(sums: Sequence[Any], load: Callable[[Any], Any], offset: Any) -> list[Any]:
        query = load(builder.add(query_at, offset))
        return [vectors.dot(total, load(builder.add(key, offset)), query) for total, key in zip(sums, keys, strict=True)]

    def load_whole(place: Any) -> Any:
        return builder.load(_at(builder, place, vectors.ints), align=2)

    # What is behind the last whole vector is read lane by lane: beyond the head may be another's, or no memory.
    def load_some(place: Any) -> Any:
        return _load_some(builder, vectors, place, mask, INT)

    loop = Loop(builder, num_whole, LANES, [vectors.zero] * LANES)
    sums = loop.end(add(loop.values, load_whole, builder.shl(loop.idx, LONG(2))))
    rest = Loop(builder, builder.zext(has_rest, LONG), 1, sums)
    found = rest.end(add(rest.values, load_some, builder.shl(num_whole, LONG(2))))
    builder.store(_fold(builder, found), _at(builder, to, vectors.floats), align=4)
    each.end()


def _emit_sums(builder: Any, arguments: Sequence[Any], kind: str, rows: int, count: int) -> None:
    """Add up the values for `rows` queries, and up to `count` vectors of a head."""
    out_at, out_stride, weights_at, weights_stride, list_at, num_keys, offset, num_left = arguments
    vectors, is_brain = Floats(builder, kind), kind == BFLOAT16
    element = ir.IntType(16) if is_brain else INT
    masks = [_make_mask(builder, builder.sub(num_left, LONG(LANES * vector))) for vector in range(count)]
    outs = []
    for row in range(rows):
        at = builder.add(out_at, builder.mul(out_stride, LONG(row)))
        outs += [_at(builder, builder.add(at, LONG(4 * LANES * vector)), vectors.floats) for vector in range(count)]
    rows_at = [builder.add(weights_at, builder.mul(weights_stride, LONG(row))) for row in range(rows)]
    loop = Loop(builder, num_keys, 1, [builder.load(out, align=4) for out in outs])
    value_at = builder.load(_at(builder, builder.add(list_at, builder.shl(loop.idx, LONG(3))), LONG))
    value_at, values = builder.add(value_at, offset), []
    for vector in range(count):
        place = builder.add(value_at, LONG((2 if is_brain else 4) * LANES * vector))
        value = _load_some(builder, vectors, place, masks[vector], element)
        if is_brain:
            value = builder.shl(builder.zext(value, vectors.ints), ir.Constant(vectors.ints, [16] * LANES))
        values.append(builder.bitcast(value, vectors.floats))
    found = []
    for row in range(rows):
        place = builder.add(rows_at[row], builder.shl(loop.idx, LONG(2)))
        weight = builder.bitcast(vectors.spread(builder.load(_at(builder, place, INT), align=4)), vectors.floats)
        sums = loop.values[row * count : (row + 1) * count]
        found += [vectors.call(_FMA, vectors.floats, weight, value, total) for value, total in zip(values, sums, strict=True)]
    for out, total in zip(outs, loop.end(found), strict=True):
        builder.store(total, out, align=4)


def _emit_all_sums(builder: Any, arguments: Sequence[Any], kind: str) -> None:
    """The choice by the last two arguments, rows and vectors."""
    *same, rows, count = arguments
    emit_by_size(builder, rows, count, lambda own_rows, own_count: _emit_sums(builder, same, kind, own_rows, own_count))


def make_scores(kind: str) -> Any:
    """The intrinsic score_keys(queries_at, offset, num_queries, list_at, num_words, out_at, out_stride): LANES keys' scores.

    queries_at: addresses, behind each of which a query lies at an offset. list_at: addresses of the keys. num_words: of four
    bytes, of a head. out: float32 [queries, LANES], a query's at a stride of bytes.
    """

    @intrinsic
    def score_keys(typing_context, queries_at, offset, num_queries, list_at, num_words, out_at, out_stride):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            call_outlined(builder, f"kvkeeper_scores_{kind}", partial(_emit_scores, kind=kind), arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return score_keys


def make_sums(kind: str) -> Any:
    """The helper add_values(out_at, out_stride, weights_at, weights_stride, list_at, num_keys, num_queries, size).

    It adds to out, float32 [queries, size in whole vectors], the values at the addresses of the list times weights, float32
    [queries, keys].
    """

    @intrinsic
    def add_tile(
        typing_context, out_at, out_stride, weights_at, weights_stride, list_at, num_keys, offset, num_left, rows, vectors
    ):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            call_outlined(builder, f"kvkeeper_sums_{kind}", partial(_emit_all_sums, kind=kind), arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    many, lanes, most_vectors, num_bytes = MOST_ROWS, LANES, MOST_VECTORS, 2 if kind == BFLOAT16 else 4

    @helper
    def add_values(out_at, out_stride, weights_at, weights_stride, list_at, num_keys, num_queries, size):
        column = 0
        while column < size:
            vectors = most_vectors
            while vectors > 1 and (vectors - 1) * lanes >= size - column:
                vectors //= 2
            row = 0
            while row < num_queries:
                rows = min(many, num_queries - row)
                add_tile(
                    out_at + row * out_stride + column * 4,
                    out_stride,
                    weights_at + row * weights_stride,
                    weights_stride,
                    list_at,
                    num_keys,
                    column * num_bytes,
                    size - column,
                    rows,
                    vectors,
                )
                row += rows
            column += vectors * lanes

    return add_values
