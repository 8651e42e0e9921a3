"""Softmax over the keys of a tile, for as many queries at once as a vector has lanes, as vector instructions.

Scores lie key by key, [keys, queries], so that neither the maximum nor the sum of a query crosses lanes. A query is followed
from tile to tile by the highest score that it has met and the sum of its exponentials (online softmax, Milakov and Gimelshein,
arXiv 1805.02867).
"""

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .tiles import LANES, call_outlined

_INT, _LONG = ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)
_FACTORS: Final = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _all(number: float) -> Any:
    return ir.Constant(_FLOATS, [number] * LANES)


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    name = f"llvm.{name}.v{LANES}f32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * len(arguments)), name)
    return builder.call(function, arguments)


def _emit_exp(builder: Any, x: Any) -> Any:
    """e^x as kernel_parts.exp has it, of numbers that are 0 at most, or not numbers."""
    x = builder.select(builder.fcmp_ordered("<", x, _all(-87.0)), _all(-87.0), x)
    whole = _call(builder, "floor", _call(builder, "fma", x, _all(1.44269504), _all(0.5)))
    rest = _call(builder, "fma", whole, _all(-0.693359375), x)
    rest = _call(builder, "fma", whole, _all(2.12194440e-4), rest)
    series = _all(_FACTORS[0])
    for factor in _FACTORS[1:]:
        series = _call(builder, "fma", series, rest, _all(factor))
    series = _call(builder, "fma", builder.fmul(series, rest), rest, builder.fadd(rest, _all(1.0)))
    exponent = builder.add(builder.fptosi(whole, _INTS), ir.Constant(_INTS, [127] * LANES))
    return builder.fmul(series, builder.bitcast(builder.shl(exponent, ir.Constant(_INTS, [23] * LANES)), _FLOATS))


def _emit_loop(builder: Any, count: Any, at: Any, step: Any, begin: Any, body: Any) -> Any:
    """Give body each key's pointer and the value so far; what it gives at last. There is at least one key."""
    before, block, after = builder.block, builder.append_basic_block("key"), builder.append_basic_block("after")
    builder.branch(block)
    builder.position_at_end(block)
    idx, place, value = builder.phi(_LONG), builder.phi(_LONG), builder.phi(_FLOATS)
    found = body(builder.inttoptr(place, _FLOATS.as_pointer()), value)
    moved = builder.add(idx, _LONG(1))
    for phi, first, following in ((idx, _LONG(0), moved), (place, at, builder.add(place, step)), (value, begin, found)):
        phi.add_incoming(first, before)
        phi.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", moved, count), block, after)
    builder.position_at_end(after)
    return found


def _emit_column(builder: Any, arguments: Sequence[Any]) -> None:
    """One vector of queries."""
    scores_at, num_keys, step, *state, scale = arguments
    highest_at, totals_at, factors_at = (builder.inttoptr(each, _FLOATS.as_pointer()) for each in state)
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scale, _INT(0))
    scales = builder.shuffle_vector(first, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * LANES))

    def take_highest(key: Any, highest: Any) -> Any:
        score = builder.fmul(builder.load(key, align=4), scales)
        return builder.select(builder.fcmp_ordered(">", score, highest), score, highest)

    before = builder.load(highest_at, align=4)
    highest = _emit_loop(builder, num_keys, scores_at, step, before, take_highest)

    def weigh(key: Any, total: Any) -> Any:
        weight = _emit_exp(builder, builder.fsub(builder.fmul(builder.load(key, align=4), scales), highest))
        builder.store(weight, key, align=4)
        return builder.fadd(total, weight)

    total = _emit_loop(builder, num_keys, scores_at, step, _all(0.0), weigh)
    factor = _emit_exp(builder, builder.fsub(before, highest))
    builder.store(highest, highest_at, align=4)
    builder.store(factor, factors_at, align=4)
    builder.store(_call(builder, "fma", builder.load(totals_at, align=4), factor, total), totals_at, align=4)


@intrinsic
def soften_column(
    typing_context: Any, scores_at: Any, num_keys: Any, step: Any, highest_at: Any, totals_at: Any, factors_at: Any, scale: Any
) -> Any:
    """Replace the scores of LANES queries, `step` bytes from key to key, by their weights.

    The highest scores and the totals at highest_at and totals_at follow; at factors_at is left what sums of earlier weights are
    to be multiplied by. Scores are multiplied by scale first.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call_outlined(builder, "kvkeeper_softmax", _emit_column, arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32), generate
