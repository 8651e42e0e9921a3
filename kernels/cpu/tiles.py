"""Products of small tiles, as vector instructions: what all matrix products and attention of compiled kernels are made of.

A tile is up to MOST_ROWS rows times up to MOST_VECTORS vectors of sums, which stay in registers while the steps go by. A step
takes four bytes of each row and four bytes for each sum: one float32, two bfloat16, or four integers of 8 bits. So all three
kinds of numbers share one loop, and one layout of weights, [steps, outputs, numbers of a step]. The order in which a sum is made
does not depend on the rows and columns beside it.

The code is written as LLVM's instructions, because a loop in Python does not say what has to stay in registers (BLIS, Van Zee
and van de Geijn 2015, has the structure). Which instructions there are follows from the features that numba compiles for.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .kernel_parts import count_threads, helper

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"

_FEATURES: Final = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
_IS_WIDE: Final = {"+avx512f", "+avx512bw", "+avx512vl"} <= _FEATURES
LANES: Final = 16 if _IS_WIDE else 8 if "+avx2" in _FEATURES else 4
MOST_ROWS: Final = 6
MOST_VECTORS: Final = 2 if LANES == 8 else 4  # AVX2 has half as many registers as the others
MOST_COLUMNS: Final = MOST_VECTORS * LANES
PANEL: Final = 96  # rows whose sums stay near while the steps of a slice of weights go by
DEEP: Final = 2048  # steps of a slice that stay in the second cache while rows go by
_DOTS_BRAINS: Final = _IS_WIDE and "+avx512bf16" in _FEATURES
_DOTS_BYTES: Final = (_IS_WIDE and "+avx512vnni" in _FEATURES) or (LANES == 8 and "+avxvnni" in _FEATURES)
_ADDS_BYTES: Final = "+avx2" in _FEATURES

_BYTE, _SHORT, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT, LANES), ir.VectorType(_FLOAT, LANES)
_SHORTS, _BYTES = ir.VectorType(_SHORT, 2 * LANES), ir.VectorType(_BYTE, 4 * LANES)
_BITS: Final = 32 * LANES


class _Brains(ir.Type):  # type: ignore[misc]
    """A vector of bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return f"<{2 * LANES} x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Brains)

    def __hash__(self) -> int:
        return hash(_Brains)


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call one of LLVM's functions."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [each.type for each in arguments]), name)
    return builder.call(function, arguments)


def _all(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)


def _dot_floats(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    weights, x = builder.bitcast(weights, _FLOATS), builder.bitcast(x, _FLOATS)
    return _call(builder, f"llvm.fma.v{LANES}f32", _FLOATS, weights, x, sums)


def _dot_brains(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    if _DOTS_BRAINS:
        brains = _Brains()
        pairs = builder.bitcast(weights, brains), builder.bitcast(x, brains)
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, sums, *pairs)
    low = [builder.shl(each, _all(16)) for each in (weights, x)]
    high = [builder.and_(each, _all(-1 << 16)) for each in (weights, x)]
    return _dot_floats(builder, _dot_floats(builder, sums, *low), *high)


def _dot_bytes(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """x without signs, weights with. No sum of two products takes more than 15 bits: see linear_int8."""
    if _DOTS_BYTES:
        return _call(builder, f"llvm.x86.avx512.vpdpbusd.{_BITS}", _INTS, sums, x, weights)
    if _ADDS_BYTES:
        prefix, add_pairs, add_fours = (
            ("avx512", "pmaddubs.w.512", "pmaddw.d.512") if _IS_WIDE else ("avx2", "pmadd.ub.sw", "pmadd.wd")
        )
        pairs = _call(
            builder, f"llvm.x86.{prefix}.{add_pairs}", _SHORTS, builder.bitcast(x, _BYTES), builder.bitcast(weights, _BYTES)
        )
        ones = ir.Constant(_SHORTS, [1] * 2 * LANES)
        return builder.add(sums, _call(builder, f"llvm.x86.{prefix}.{add_fours}", _INTS, pairs, ones))
    for place in range(0, 32, 8):
        own = builder.ashr(builder.shl(weights, _all(24 - place)), _all(24))
        sums = builder.add(sums, builder.mul(own, builder.and_(builder.lshr(x, _all(place)), _all(255))))
    return sums


_DOTS: Final = {FLOAT32: _dot_floats, BFLOAT16: _dot_brains, INT8: _dot_bytes}


def _emit_tile(builder: Any, kind: str, rows: int, vectors: int, arguments: Any) -> None:
    """One tile; leaves the builder at its end. The arguments are those of _multiply_tile, but for rows and vectors."""
    out_at, out_stride, x_at, x_stride, x_step, weights_at, weights_step, num_steps, is_more = arguments
    sums_type = _INTS if kind == INT8 else _FLOATS
    zero = ir.Constant(sums_type, [0 if kind == INT8 else 0.0] * LANES)
    outs = [
        builder.inttoptr(
            builder.add(builder.add(out_at, builder.mul(out_stride, _LONG(row))), _LONG(4 * LANES * vector)),
            sums_type.as_pointer(),
        )
        for row in range(rows)
        for vector in range(vectors)
    ]
    xs = [builder.add(x_at, builder.mul(x_stride, _LONG(row))) for row in range(rows)]
    before, step, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("after")
    builder.branch(step)
    builder.position_at_end(step)
    idx, x_offset, at = builder.phi(_LONG), builder.phi(_LONG), builder.phi(_LONG)
    sums = [builder.phi(sums_type) for _ in outs]
    for phi, begin in ((idx, _LONG(0)), (x_offset, _LONG(0)), (at, weights_at), *((each, zero) for each in sums)):
        phi.add_incoming(begin, before)
    weights = [
        builder.load(builder.inttoptr(builder.add(at, _LONG(4 * LANES * vector)), _INTS.as_pointer()), align=4)
        for vector in range(vectors)
    ]
    found = []
    for row in range(rows):
        number = builder.load(builder.inttoptr(builder.add(xs[row], x_offset), _INT.as_pointer()), align=1)
        first = builder.insert_element(ir.Constant(_INTS, ir.Undefined), number, _INT(0))
        x = builder.shuffle_vector(first, ir.Constant(_INTS, ir.Undefined), _all(0))
        found += [_DOTS[kind](builder, sums[row * vectors + vector], weights[vector], x) for vector in range(vectors)]
    moved = builder.add(idx, _LONG(1)), builder.add(x_offset, x_step), builder.add(at, weights_step)
    for phi, value in zip((idx, x_offset, at, *sums), (*moved, *found), strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", moved[0], num_steps), step, after)
    builder.position_at_end(after)
    add, keep = builder.append_basic_block("add"), builder.append_basic_block("keep")
    ends = builder.append_basic_block("end")
    builder.cbranch(builder.icmp_signed("!=", is_more, _LONG(0)), add, keep)
    for block, has_more in ((add, True), (keep, False)):
        builder.position_at_end(block)
        for out, total in zip(outs, found, strict=True):
            if has_more:
                earlier = builder.load(out, align=4)
                total = builder.add(earlier, total) if kind == INT8 else builder.fadd(earlier, total)
            builder.store(total, out, align=4)
        builder.branch(ends)
    builder.position_at_end(ends)


def call_outlined(builder: Any, name: str, emit: Callable[[Any, Sequence[Any]], None], arguments: Sequence[Any]) -> None:
    """Call what `emit` writes as a function of its own, once a module: inlined everywhere it would take minutes to compile."""
    function = builder.module.globals.get(name)
    if function is None:
        of_type = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
        function = ir.Function(builder.module, of_type, name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        own = ir.IRBuilder(function.append_basic_block("entry"))
        emit(own, function.args)
        own.ret_void()
    builder.call(function, arguments)


def _emit_tiles(builder: Any, kind: str, arguments: Sequence[Any]) -> None:
    """A tile of each size, and the choice of one by the last two arguments, rows and vectors."""
    *same, rows, vectors = arguments
    end = builder.append_basic_block("done")
    switch = builder.switch(builder.add(builder.mul(vectors, _LONG(MOST_ROWS)), rows), end)
    width = 1
    while width <= MOST_VECTORS:
        for count in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block("tile")
            switch.add_case(_LONG(width * MOST_ROWS + count), block)
            builder.position_at_end(block)
            _emit_tile(builder, kind, count, width, same)
            builder.branch(end)
        width *= 2
    builder.position_at_end(end)


def _make_tile(kind: str) -> Any:
    @intrinsic
    def multiply_tile(
        typing_context: Any,
        out_at: Any,
        out_stride: Any,
        x_at: Any,
        x_stride: Any,
        x_step: Any,
        weights_at: Any,
        weights_step: Any,
        num_steps: Any,
        is_more: Any,
        rows: Any,
        vectors: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            call_outlined(builder, f"kvkeeper_tile_{kind}", lambda own, args: _emit_tiles(own, kind, args), arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return multiply_tile


def make_multiply(kind: str) -> Any:
    """The helper that multiplies rows of one kind by a block of weights.

    It is multiply(out_at, out_stride, x_at, x_stride, x_step, weights_at, weights_step, num_steps, num_rows, width, is_more):
    out [rows, width], sums of float32 or int32, of x [rows, steps] and weights [steps, width], each with its strides in bytes
    and steps of four bytes; added to what is there if is_more. width is a multiple of LANES; there is at least one step.
    """
    multiply_tile, many, lanes, most_vectors = _make_tile(kind), MOST_ROWS, LANES, MOST_VECTORS

    @helper
    def multiply(out_at, out_stride, x_at, x_stride, x_step, weights_at, weights_step, num_steps, num_rows, width, is_more):  # type: ignore[no-untyped-def]
        column = 0
        while column < width:
            vectors = most_vectors
            while vectors * lanes > width - column:
                vectors //= 2
            row = 0
            while row < num_rows:
                rows = min(many, num_rows - row)
                multiply_tile(
                    out_at + row * out_stride + column * 4,
                    out_stride,
                    x_at + row * x_stride,
                    x_stride,
                    x_step,
                    weights_at + column * 4,
                    weights_step,
                    num_steps,
                    is_more,
                    rows,
                    vectors,
                )
                row += rows
            column += vectors * lanes

    return multiply


@helper
def find_slice(args, width, num_out):  # type: ignore[no-untyped-def]
    """The outputs that a thread takes at a time: what registers have sums for, or less where threads would be without any."""
    size = min(np.int64(MOST_COLUMNS), width)
    while size > LANES and num_out < 2 * size * count_threads(args):
        size //= 2
    return size
