"""A tile of a delta rule's matrix, as vector instructions: a token changes it, and the next one reads it, in one pass.

A tile is COLUMNS wide, which registers have sums for, and as high as a key has dimensions. Its rows are taken two at a time, so
that there are twice as many sums and none waits for the one before; they are added up in the same order whatever is beside the
tile, so that it does not show where a run of tokens was cut.
"""

from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .tiles import FLOAT32, LANES, LONG, MOST_VECTORS, Floats, call_outlined

COLUMNS: Final = LANES * MOST_VECTORS
_FLOAT = ir.FloatType()


@intrinsic
def copy_columns(typing_context, from_at, to_at):
    """Copy COLUMNS numbers of float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        floats = Floats(builder, FLOAT32).floats.as_pointer()
        for number in range(MOST_VECTORS):
            origin, to = (builder.inttoptr(builder.add(each, LONG(4 * LANES * number)), floats) for each in arguments)
            builder.store(builder.load(origin, align=4), to, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _make_pass(name: str, decay: Any) -> Any:
    @intrinsic
    def pass_tile(typing_context, tile_at, num_keys, decay_or_at, k_at, delta_at, next_k_at, next_q_at, held_at, made_at):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            call_outlined(builder, name, partial(_emit, has_many=decay is types.int64), arguments)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, decay, *[types.int64] * 6), generate

    return pass_tile


def _emit(builder: Any, arguments: Any, has_many: bool) -> None:
    """The whole pass; leaves the builder at its end."""
    tile_at, num_keys, decay, k_at, delta_at, next_k_at, next_q_at, held_at, made_at = arguments
    of = Floats(builder, FLOAT32)
    fma = f"llvm.fma.v{LANES}f32"

    def vector_at(address: Any, number: int) -> Any:
        return builder.inttoptr(builder.add(address, LONG(4 * LANES * number)), of.floats.as_pointer())

    def spread_at(address: Any, offset: Any) -> Any:
        return of.spread_float(builder.load(builder.inttoptr(builder.add(address, offset), _FLOAT.as_pointer()), align=4))

    decays = None if has_many else of.spread_float(decay)
    deltas = [builder.load(vector_at(delta_at, number), align=4) for number in range(MOST_VECTORS)]
    before, step, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("after")
    builder.branch(step)
    builder.position_at_end(step)
    at, offset = builder.phi(LONG), builder.phi(LONG)
    sums = [builder.phi(of.floats) for _ in range(4 * MOST_VECTORS)]
    for phi, begin in ((at, tile_at), (offset, LONG(0)), *((each, of.zero) for each in sums)):
        phi.add_incoming(begin, before)
    found = []
    for row in range(2):
        place = builder.add(offset, LONG(4 * row))
        k, next_k, next_q = (spread_at(each, place) for each in (k_at, next_k_at, next_q_at))
        kept_part = spread_at(decay, place) if has_many else decays
        for number in range(MOST_VECTORS):
            own = vector_at(at, row * MOST_VECTORS + number)
            kept = builder.fmul(builder.load(own, align=4), kept_part)
            value = of.call(fma, of.floats, k, deltas[number], kept)
            builder.store(value, own, align=4)
            held, made = sums[2 * (row * MOST_VECTORS + number) :][:2]
            found += [of.call(fma, of.floats, next_k, value, held), of.call(fma, of.floats, next_q, value, made)]
    moved = builder.add(at, LONG(8 * COLUMNS)), builder.add(offset, LONG(8))
    for phi, value in zip((at, offset, *sums), (*moved, *found), strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", moved[1], builder.mul(num_keys, LONG(4))), step, after)
    builder.position_at_end(after)
    half = 2 * MOST_VECTORS
    for number in range(MOST_VECTORS):
        for which, to in enumerate((held_at, made_at)):
            total = builder.fadd(found[2 * number + which], found[half + 2 * number + which])
            builder.store(total, vector_at(to, number), align=4)


# tile [num_keys, COLUMNS] = decay tile + k delta; held [COLUMNS] = next_k tile, and made [COLUMNS] = next_q tile, of that.
# num_keys is even. All are float32 by their addresses, but for decay; of channels it is [num_keys] by its address, too.
pass_tile: Final = _make_pass("kvkeeper_delta_tile", types.float32)
pass_tile_of_channels: Final = _make_pass("kvkeeper_delta_tile_of_channels", types.int64)
