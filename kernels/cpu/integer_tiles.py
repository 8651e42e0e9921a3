"""Tiles of products of integers, as vector instructions: rows of 8 bits times weights of 8 or 4, in groups with scales.

GROUP inputs of a row have a scale, and so have GROUP inputs of an output, as in llama.cpp's Q8_0 and Q4_1. Within a group the
sums are exact. A weight of 8 bits is `scale` times an integer of -127 to 127, one of 4 bits `low` and `scale` times one of 0 to
15. So an output is the sum over its groups of `row scale * (scale * sum of products + low * sum of the row's integers)`, in
their order, and all processors give the same bits.

A group of WIDTH outputs lies in one piece: its integers [steps, WIDTH, 4], or of 4 bits [steps / 2, WIDTH, 4] with two steps to
a byte, the first in its low bits; its scales, halves [WIDTH]; and of 4 bits its lows, likewise.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .kernel_parts import helper
from .products import GROUP
from .tiles import (
    ADDS_BYTES,
    BITS,
    DOTS_BYTES,
    HAS_HALVES,
    INT,
    LANES,
    LONG,
    MOST_COLUMNS,
    MOST_ROWS,
    Vectors,
    call_outlined,
    emit_by_size,
)

STEPS: Final = GROUP // 4
WIDTH: Final = MOST_COLUMNS  # so that a thread reads its weights from one end to the other
_BYTE, _SHORT, _HALF, _FLOAT = ir.IntType(8), ir.IntType(16), ir.HalfType(), ir.FloatType()
_ROW_BYTES: Final = WIDTH * 4
# On either side of 0, as multiply-and-add of bytes wants one of its factors without a sign, see _dot.
_OFFSET: Final = 128


class _Integers(Vectors):
    """Products of bytes: those of x have signs; weights have them in 8 bits, and none in 4."""

    def __init__(self, builder: Any, bits: int) -> None:
        super().__init__(builder)
        self._bits, self._shifts_weights = bits, bits == 8 and DOTS_BYTES
        self._shorts = ir.VectorType(_SHORT, 2 * LANES)
        # Products of weights of 4 bits are so small that 16 bits hold the sums of a group.
        self._has_short_sums = bits == 4 and ADDS_BYTES and not DOTS_BYTES
        self.sums = self._shorts if self._has_short_sums else self.ints

    def start(self, total: Any) -> Any:
        """What the sums of a group begin with. total: the sum of the row's integers."""
        if not self._shifts_weights:
            return ir.Constant(self.sums, [0] * self.sums.count)
        return self.spread(self._builder.mul(total, INT(-_OFFSET)))

    def unpack(self, weights: Any) -> list[Any]:
        """The weights of each step that a vector of memory has."""
        builder = self._builder
        if self._bits == 8:
            return [builder.xor(weights, self.fill(_OFFSET * 0x01010101)) if self._shifts_weights else weights]
        mask = self.fill(0x0F0F0F0F)
        return [builder.and_(weights, mask), builder.and_(builder.lshr(weights, self.fill(4)), mask)]

    def end(self, sums: Any) -> Any:
        """The sums of a group, as int32."""
        return self._add_pairs(sums) if self._has_short_sums else sums

    def _add_pairs(self, shorts: Any) -> Any:
        ones = ir.Constant(self._shorts, [1] * 2 * LANES)
        return self.call(f"llvm.x86.{'avx512.pmaddw.d.512' if BITS == 512 else 'avx2.pmadd.wd'}", self.ints, shorts, ones)

    def dot(self, sums: Any, weights: Any, x: Any) -> Any:
        """Add the products of four bytes a lane. No sum of two products takes more than 15 bits."""
        builder = self._builder
        if DOTS_BYTES:
            return self.call(f"llvm.x86.avx512.vpdpbusd.{BITS}", self.ints, sums, weights, x)
        if ADDS_BYTES:
            if self._bits == 8:  # the sign goes over to x
                weights, x = self._apart(weights, x)
            name = "avx512.pmaddubs.w.512" if BITS == 512 else "avx2.pmadd.ub.sw"
            pairs = self.call(f"llvm.x86.{name}", self._shorts, self._as_bytes(weights), self._as_bytes(x))
            return builder.add(sums, pairs if self._has_short_sums else self._add_pairs(pairs))
        for place in range(0, 32, 8):
            own, of_x = (builder.ashr(builder.shl(each, self.fill(24 - place)), self.fill(24)) for each in (weights, x))
            sums = builder.add(sums, builder.mul(own, of_x))
        return sums

    def _as_bytes(self, vector: Any) -> Any:
        return self._builder.bitcast(vector, ir.VectorType(_BYTE, 4 * LANES))

    def _apart(self, weights: Any, x: Any) -> tuple[Any, Any]:
        """Weights without their signs, and x with them."""
        builder, weights, x = self._builder, self._as_bytes(weights), self._as_bytes(x)
        if BITS == 256:
            sign = partial(self.call, "llvm.x86.avx2.psign.b", weights.type)
            return sign(weights, weights), sign(x, weights)
        zero = ir.Constant(weights.type, [0] * 4 * LANES)
        is_less = builder.icmp_signed("<", weights, zero)
        return tuple(builder.select(is_less, builder.sub(zero, each), each) for each in (weights, x))

    def load_halves(self, address: Any) -> Any:
        """Halves as float32; they are finite."""
        builder = self._builder
        if HAS_HALVES:
            pointer = builder.inttoptr(address, ir.VectorType(_HALF, LANES).as_pointer())
            return builder.fpext(builder.load(pointer, align=2), self.floats)
        pointer = builder.inttoptr(address, ir.VectorType(_SHORT, LANES).as_pointer())
        halves = builder.sext(builder.load(pointer, align=2), self.ints)
        bits = builder.and_(builder.shl(halves, self.fill(13)), self.fill(-0x70002000))  # the sign, and all else 13 places up
        return builder.fmul(builder.bitcast(bits, self.floats), ir.Constant(self.floats, [2.0**112] * LANES))


def _emit_tile(builder: Any, bits: int, rows: int, vectors: int, arguments: Any) -> None:
    """One tile; leaves the builder at its end. The arguments are those of multiply_tile, but for rows and vectors."""
    out_at, out_stride, x_at, x_stride, terms_at, terms_stride, weights_at, scales_at, group_bytes, num_groups, is_more = (
        arguments
    )
    of = _Integers(builder, bits)
    outs = []
    for row in range(rows):
        at = builder.add(out_at, builder.mul(out_stride, LONG(row)))
        places = (builder.add(at, LONG(4 * LANES * vector)) for vector in range(vectors))
        outs += [builder.inttoptr(place, of.floats.as_pointer()) for place in places]
    begin, clean, group, after = (builder.append_basic_block(name) for name in ("begin", "clean", "group", "after"))
    builder.cbranch(builder.icmp_signed("!=", is_more, LONG(0)), begin, clean)
    builder.position_at_end(begin)
    kept = [builder.load(out, align=4) for out in outs]
    builder.branch(group)
    builder.position_at_end(clean)
    builder.branch(group)
    builder.position_at_end(group)
    number, totals = builder.phi(LONG), [builder.phi(of.floats) for _ in outs]
    number.add_incoming(LONG(0), begin)
    number.add_incoming(LONG(0), clean)
    for total, before in zip(totals, kept, strict=True):
        total.add_incoming(before, begin)
        total.add_incoming(ir.Constant(of.floats, [0.0] * LANES), clean)
    done = builder.mul(number, group_bytes)
    own_weights, own_scales = builder.add(weights_at, done), builder.add(scales_at, done)
    row_scales, row_sums, xs = [], [], []
    for row in range(rows):
        terms = builder.add(builder.add(terms_at, builder.mul(terms_stride, LONG(row))), builder.mul(number, LONG(8)))
        row_scales.append(builder.load(builder.inttoptr(terms, _FLOAT.as_pointer()), align=4))
        row_sums.append(builder.load(builder.inttoptr(builder.add(terms, LONG(4)), INT.as_pointer()), align=4))
        xs.append(builder.add(builder.add(x_at, builder.mul(x_stride, LONG(row))), builder.mul(number, LONG(GROUP))))
    starts = [start for total in row_sums for start in [of.start(total)] * vectors]
    sums = _emit_steps(builder, of, bits, xs, own_weights, starts)
    scales = [of.load_halves(builder.add(own_scales, LONG(2 * LANES * vector))) for vector in range(vectors)]
    lows = [
        of.load_halves(builder.add(own_scales, LONG(2 * (WIDTH + LANES * vector)))) for vector in range(vectors) if bits == 4
    ]
    fma, found = partial(of.call, f"llvm.fma.v{LANES}f32", of.floats), []
    for at, total in enumerate(totals):
        row, vector = divmod(at, vectors)
        scaled = builder.fmul(builder.sitofp(sums[at], of.floats), scales[vector])
        made = fma(scaled, of.spread_float(row_scales[row]), total)
        if lows:
            shift = builder.fmul(builder.sitofp(row_sums[row], _FLOAT), row_scales[row])
            made = fma(lows[vector], of.spread_float(shift), made)
        found.append(made)
    following = builder.add(number, LONG(1))
    for phi, value in zip((number, *totals), (following, *found), strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, num_groups), group, after)
    builder.position_at_end(after)
    for out, made in zip(outs, found, strict=True):
        builder.store(made, out, align=4)


def _emit_steps(builder: Any, of: _Integers, bits: int, xs: Sequence[Any], weights_at: Any, starts: Sequence[Any]) -> list[Any]:
    """The sums of a group; leaves the builder behind its steps."""
    vectors, per_load = len(starts) // len(xs), 8 // bits
    before, step, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("scale")
    builder.branch(step)
    builder.position_at_end(step)
    idx, sums = builder.phi(LONG), [builder.phi(of.sums) for _ in starts]
    for phi, begin in zip((idx, *sums), (LONG(0), *starts), strict=True):
        phi.add_incoming(begin, before)
    at = builder.add(weights_at, builder.mul(idx, LONG(_ROW_BYTES)))
    weights = []
    for vector in range(vectors):
        pointer = builder.inttoptr(builder.add(at, LONG(4 * LANES * vector)), of.ints.as_pointer())
        weights.append(of.unpack(builder.load(pointer, align=4)))
    found: list[Any] = list(sums)
    for part in range(per_load):
        offset = builder.add(builder.mul(idx, LONG(4 * per_load)), LONG(4 * part))
        for row, row_at in enumerate(xs):
            x = of.spread(builder.load(builder.inttoptr(builder.add(row_at, offset), INT.as_pointer()), align=1))
            for vector in range(vectors):
                place = row * vectors + vector
                found[place] = of.dot(found[place], weights[vector][part], x)
    moved = builder.add(idx, LONG(1))
    for phi, value in zip((idx, *sums), (moved, *found), strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", moved, LONG(STEPS // per_load)), step, after)
    builder.position_at_end(after)
    return [of.end(each) for each in found]


def _emit_tiles(builder: Any, arguments: Sequence[Any], bits: int) -> None:
    """A tile of each size, and the choice of one by the last two arguments, rows and vectors."""
    *same, rows, vectors = arguments
    emit_by_size(builder, rows, vectors, lambda count, width: _emit_tile(builder, bits, count, width, same))


def _make_tile(bits: int) -> Any:
    @intrinsic
    def multiply_tile(
        typing_context,
        out_at,
        out_stride,
        x_at,
        x_stride,
        terms_at,
        terms_stride,
        weights_at,
        scales_at,
        group_bytes,
        num_groups,
        is_more,
        rows,
        vectors,
    ):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            call_outlined(builder, f"kvkeeper_integer_tile_{bits}", partial(_emit_tiles, bits=bits), arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 13), generate

    return multiply_tile


def make_multiply_integers(bits: int) -> Any:
    """The helper that multiplies rows of integers by groups of a block of weights of so many bits.

    It is multiply(out_at, out_stride, x_at, x_stride, terms_at, terms_stride, weights_at, scales_at, group_bytes, num_groups,
    num_rows, width, is_more): out float32 [rows, width], of x int8 [rows, groups, GROUP] and its terms [rows, groups, 2], each
    a float32 scale and the int32 sum of the group's integers; added to what is there if is_more. weights_at and scales_at are
    those of the first group and of the first output, and the next group is group_bytes on. width is 1, 2, 4 up to MOST_VECTORS
    times LANES.
    """
    multiply_tile, many, lanes = _make_tile(bits), MOST_ROWS, LANES

    @helper
    def multiply(
        out_at,
        out_stride,
        x_at,
        x_stride,
        terms_at,
        terms_stride,
        weights_at,
        scales_at,
        group_bytes,
        num_groups,
        num_rows,
        width,
        is_more,
    ):
        vectors, row = width // lanes, 0
        while row < num_rows:
            rows = min(many, num_rows - row)
            multiply_tile(
                out_at + row * out_stride,
                out_stride,
                x_at + row * x_stride,
                x_stride,
                terms_at + row * terms_stride,
                terms_stride,
                weights_at,
                scales_at,
                group_bytes,
                num_groups,
                is_more,
                rows,
                vectors,
            )
            row += rows

    return multiply
