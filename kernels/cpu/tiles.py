"""Products of small tiles, as vector instructions: what all matrix products and attention of compiled kernels are made of.

A tile is up to MOST_ROWS rows times up to MOST_VECTORS vectors of sums, which stay in registers while the steps go by. A step
takes four bytes of each row and four bytes for each sum: one float32 or two bfloat16. So both kinds of numbers share one loop,
and one layout of weights, [steps, outputs, numbers of a step]. The order in which a sum is made does not depend on the rows and
columns beside it. Tiles of integers are in integer_tiles.py.

The code is written as LLVM's instructions, because a loop in Python does not say what has to stay in registers (BLIS, Van Zee
and van de Geijn 2015, has the structure). Which instructions there are follows from the features that numba compiles for.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .kernel_parts import count_threads, helper

FLOAT32, BFLOAT16 = "float32", "bfloat16"

_FEATURES: Final = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
_IS_WIDE: Final = {"+avx512f", "+avx512bw", "+avx512vl"} <= _FEATURES
LANES: Final = 16 if _IS_WIDE else 8 if "+avx2" in _FEATURES else 4
MOST_ROWS: Final = 6
MOST_VECTORS: Final = 2 if LANES == 8 else 4  # AVX2 has half as many registers as the others
MOST_COLUMNS: Final = MOST_VECTORS * LANES
PANEL: Final = 96  # rows whose sums stay near while the steps of a slice of weights go by
DEEP: Final = 2048  # steps of a slice that stay in the second cache while rows go by
_DOTS_BRAINS: Final = _IS_WIDE and "+avx512bf16" in _FEATURES
DOTS_BYTES: Final = (_IS_WIDE and "+avx512vnni" in _FEATURES) or (LANES == 8 and "+avxvnni" in _FEATURES)
ADDS_BYTES: Final = "+avx2" in _FEATURES
HAS_HALVES: Final = "+f16c" in _FEATURES
BITS: Final = 32 * LANES

INT, LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


class _Brains(ir.Type):
    """A vector of bfloat16, which llvmlite has no name for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def _to_string(self) -> str:
        return f"<{self._count} x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Brains) and self._count == other._count

    def __hash__(self) -> int:
        return hash((_Brains, self._count))


class Vectors:
    """Vectors of four bytes a lane."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.ints, self.floats = ir.VectorType(INT, LANES), ir.VectorType(_FLOAT, LANES)

    def spread(self, number: Any) -> Any:
        """A vector of one integer."""
        none = ir.Constant(self.ints, ir.Undefined)
        first = self._builder.insert_element(none, number, INT(0))
        return self._builder.shuffle_vector(first, none, self.fill(0))

    def spread_float(self, number: Any) -> Any:
        """A vector of one float32."""
        return self._builder.bitcast(self.spread(self._builder.bitcast(number, INT)), self.floats)

    def fill(self, number: int) -> Any:
        return ir.Constant(self.ints, [number] * LANES)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """Call one of LLVM's functions."""
        module = self._builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [each.type for each in arguments]), name)
        return self._builder.call(function, arguments)


class Floats(Vectors):
    """How vectors of one kind of numbers are multiplied and added up."""

    def __init__(self, builder: Any, kind: str) -> None:
        super().__init__(builder)
        self.zero = ir.Constant(self.floats, [0.0] * LANES)
        self.dot = {FLOAT32: self._dot_floats, BFLOAT16: self._dot_brains}[kind]

    def _dot_floats(self, sums: Any, weights: Any, x: Any) -> Any:
        weights, x = (self._builder.bitcast(each, self.floats) for each in (weights, x))
        return self.call(f"llvm.fma.v{LANES}f32", self.floats, weights, x, sums)

    def _dot_brains(self, sums: Any, weights: Any, x: Any) -> Any:
        if _DOTS_BRAINS:
            pairs = (self._builder.bitcast(each, _Brains(2 * LANES)) for each in (weights, x))
            return self.call(f"llvm.x86.avx512bf16.dpbf16ps.{BITS}", self.floats, sums, *pairs)
        low = [self._builder.shl(each, self.fill(16)) for each in (weights, x)]
        high = [self._builder.and_(each, self.fill(-1 << 16)) for each in (weights, x)]
        return self._dot_floats(self._dot_floats(sums, *low), *high)


def _emit_tile(builder: Any, kind: str, rows: int, vectors: int, arguments: Any) -> None:
    """One tile; leaves the builder at its end. The arguments are those of _multiply_tile, but for rows and vectors."""
    out_at, out_stride, x_at, x_stride, x_step, weights_at, weights_step, num_steps, is_more = arguments
    of, vector_bytes = Floats(builder, kind), 4 * LANES
    outs = []
    for row in range(rows):
        at = builder.add(out_at, builder.mul(out_stride, LONG(row)))
        places = (builder.add(at, LONG(vector_bytes * vector)) for vector in range(vectors))
        outs += [builder.inttoptr(place, of.floats.as_pointer()) for place in places]
    xs = [builder.add(x_at, builder.mul(x_stride, LONG(row))) for row in range(rows)]
    before, step, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("after")
    builder.branch(step)
    builder.position_at_end(step)
    idx, x_offset, at = builder.phi(LONG), builder.phi(LONG), builder.phi(LONG)
    sums = [builder.phi(of.floats) for _ in outs]
    for phi, begin in ((idx, LONG(0)), (x_offset, LONG(0)), (at, weights_at), *((each, of.zero) for each in sums)):
        phi.add_incoming(begin, before)
    places = (builder.add(at, LONG(vector_bytes * vector)) for vector in range(vectors))
    weights = [builder.load(builder.inttoptr(place, of.ints.as_pointer()), align=4) for place in places]
    found = []
    for row in range(rows):
        place = builder.inttoptr(builder.add(xs[row], x_offset), INT.as_pointer())
        x = of.spread(builder.load(place, align=1))
        found += [of.dot(sums[row * vectors + vector], weights[vector], x) for vector in range(vectors)]
    moved = builder.add(idx, LONG(1)), builder.add(x_offset, x_step), builder.add(at, weights_step)
    for phi, value in zip((idx, x_offset, at, *sums), (*moved, *found), strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", moved[0], num_steps), step, after)
    builder.position_at_end(after)
    _emit_end(builder, outs, found, is_more)


def _emit_end(builder: Any, outs: Sequence[Any], found: Sequence[Any], is_more: Any) -> None:
    """Write the sums, or add them to what is there."""
    add, keep, end = (builder.append_basic_block(name) for name in ("add", "keep", "end"))
    builder.cbranch(builder.icmp_signed("!=", is_more, LONG(0)), add, keep)
    for block, has_more in ((add, True), (keep, False)):
        builder.position_at_end(block)
        for out, total in zip(outs, found, strict=True):
            if has_more:
                total = builder.fadd(builder.load(out, align=4), total)
            builder.store(total, out, align=4)
        builder.branch(end)
    builder.position_at_end(end)


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


def emit_by_size(builder: Any, rows: Any, vectors: Any, emit: Callable[[int, int], None]) -> None:
    """A choice of what `emit` writes for each number of rows, and for vectors that are 1, 2, 4 up to the most."""
    end = builder.append_basic_block("done")
    switch = builder.switch(builder.add(builder.mul(vectors, LONG(MOST_ROWS)), rows), end)
    width = 1
    while width <= MOST_VECTORS:
        for count in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block("tile")
            switch.add_case(LONG(width * MOST_ROWS + count), block)
            builder.position_at_end(block)
            emit(count, width)
            builder.branch(end)
        width *= 2
    builder.position_at_end(end)


def _emit_tiles(builder: Any, arguments: Sequence[Any], kind: str) -> None:
    """A tile of each size, and the choice of one by the last two arguments, rows and vectors."""
    *same, rows, vectors = arguments
    emit_by_size(builder, rows, vectors, lambda count, width: _emit_tile(builder, kind, count, width, same))


def _make_tile(kind: str) -> Any:
    @intrinsic
    def multiply_tile(
        typing_context, out_at, out_stride, x_at, x_stride, x_step, weights_at, weights_step, num_steps, is_more, rows, vectors
    ):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            call_outlined(builder, f"kvkeeper_tile_{kind}", partial(_emit_tiles, kind=kind), arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return multiply_tile


def make_multiply(kind: str) -> Any:
    """The helper that multiplies rows of one kind by a block of weights.

    It is multiply(out_at, out_stride, x_at, x_stride, x_step, weights_at, weights_step, num_steps, num_rows, width, is_more):
    out [rows, width], sums of float32, of x [rows, steps] and weights [steps, width], each with its strides in bytes
    and steps of four bytes; added to what is there if is_more. width is a multiple of LANES; there is at least one step.
    """
    multiply_tile, many, lanes, most_vectors = _make_tile(kind), MOST_ROWS, LANES, MOST_VECTORS

    @helper
    def multiply(out_at, out_stride, x_at, x_stride, x_step, weights_at, weights_step, num_steps, num_rows, width, is_more):
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
def find_slice(args, width, num_out):
    """The outputs that a thread takes at a time: what registers have sums for, or less where threads would be without any."""
    size = min(np.int64(MOST_COLUMNS), width)
    while size > LANES and num_out < 2 * size * count_threads(args):
        size //= 2
    return size
