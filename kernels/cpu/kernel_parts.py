"""What compiled kernels are made of: how numba compiles them, memory at an address, a thread's share, and e^x.

Rules of all kernels. A kernel is a C function of one pointer: to a row of 8-byte arguments, of which the launcher knows the
order. The first two are libgomp's omp_get_thread_num and omp_get_num_threads, or zeros where one thread does it all. Each
thread computes its own share of the items, or takes a part of what is left as often as it gets to it; the last argument counts
what was taken. A kernel trusts its arguments. Numbers that are not finite stay so: the engine looks for them in the logits, so
no flag of fast arithmetic that forbids them is set.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

_FLAGS: Final = {"reassoc", "contract", "arcp", "nsz", "afn"}
_SIGNATURE: Final = types.void(types.voidptr)


def _can_keep() -> bool:
    """Whether numba finds a folder for what it compiles: beside this file, or the user's cache directory."""
    try:
        njit(cache=True)(lambda: None)
    except RuntimeError:
        return False
    return True


def _stamp_sources() -> str:
    """A stamp of all files of this folder.

    Numba renews what is on disk when a kernel's own file has changed, and asks for no other.
    """
    stamp = 0
    for file in sorted(Path(__file__).parent.glob("*.py")):
        stamp = zlib.crc32(file.read_bytes(), stamp)
    return f"{stamp:08x}"


ARE_KEPT: Final = _can_keep()
_STAMP: Final = _stamp_sources()


def kernel(function: Callable[[Any], None]) -> Any:
    """Compile now, or take it from disk. Where it cannot be kept there, it is compiled by every process."""
    return _compile(function, fastmath=_FLAGS)


def named_kernel(module_name: str) -> Callable[[Callable[[Any], None]], Any]:
    """The same for a file that is loaded once for each kind of number: its name on disk ends as the module's does."""

    def compile_named(function: Callable[[Any], None]) -> Any:
        function.__qualname__ += module_name.rpartition("_kernels")[2]
        return kernel(function)

    return compile_named


def exact_kernel(function: Callable[[Any], None]) -> Any:
    """The same with the arithmetic of numpy, for what has to be equal bit by bit."""
    return _compile(function)


def _compile(function: Callable[[Any], None], **options: Any) -> Any:
    function.__qualname__ += f"_{_STAMP}"  # a part of its file's name on disk
    return cfunc(_SIGNATURE, cache=ARE_KEPT, error_model="numpy", boundscheck=False, **options)(function)


helper = njit(fastmath=_FLAGS, error_model="numpy", boundscheck=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@intrinsic
def pointer_at(typing_context, address, like):
    """The pointer at an address, to elements of the type of `like`."""
    element = types.CPointer(like)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(element))

    return element(types.int64, like), generate


@intrinsic
def ask(typing_context, address):
    """Call the C function int f(void) at an address."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(ir.IntType(32), [])
        answer = builder.call(builder.inttoptr(arguments[0], function.as_pointer()), [])
        return builder.sext(answer, ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def add_at(typing_context, address, number):
    """Add to the int64 at an address, at once for all threads; what was there before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def float_of_bits(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line at an address; the address may be any."""

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        )
        builder.call(function, [builder.inttoptr(arguments[0], pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@helper
def floats_at(address, count):
    return carray(pointer_at(address, np.float32(0)), (count,))


@helper
def int64s_at(address, count):
    return carray(pointer_at(address, np.int64(0)), (count,))


@helper
def int32s_at(address, count):
    return carray(pointer_at(address, np.int32(0)), (count,))


@helper
def int8s_at(address, count):
    return carray(pointer_at(address, np.int8(0)), (count,))


@helper
def find_share(args, num_items):
    """The items of this thread, half-open."""
    if args[0] == 0:
        return 0, num_items
    idx, count = ask(args[0]), ask(args[1])
    return num_items * idx // count, num_items * (idx + 1) // count


@helper
def take_share(args, taken_at, num_items):
    """Further items for this thread, half-open; none where the threads have taken all.

    It is an eighth of a thread's part at most, so that a thread that lacks a processor for a while leaves the rest to others.
    """
    most = max(num_items // (8 * count_threads(args)), 1)
    first = min(add_at(taken_at, most), num_items)
    return first, min(first + most, num_items)


@helper
def order_by_expert(chosen):
    """Pairs in the order of their experts, and where those of each expert begin [E + 1], up to the last that is chosen."""
    begins = np.zeros(np.max(chosen) + 2, np.int64)
    for pair in range(len(chosen)):
        begins[chosen[pair] + 1] += 1
    for expert in range(1, len(begins)):
        begins[expert] += begins[expert - 1]
    order, places = np.empty(len(chosen), np.int64), begins.copy()
    for pair in range(len(chosen)):
        order[places[chosen[pair]]] = pair
        places[chosen[pair]] += 1
    return order, begins


@helper
def get_or(address, place, other):
    """A column's number, or where there is no column the other one."""
    return other if address == 0 else int64s_at(address, place + 1)[place]


@helper
def keep(array):
    """Use an array that is worked on by its address. numba frees an array behind the last use of its name."""
    array[0] = array[0]


@helper
def count_threads(args):
    return 1 if args[0] == 0 else ask(args[1])


@helper
def exp(x):
    """e^x within 2e-7 of it, from a polynomial, because a call of the C library's would keep a loop from being vectorised."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(fastmath=True, error_model="numpy", boundscheck=False)
def greatest_magnitude(row):
    """Any number for a row that is not finite."""
    greatest = np.float32(0)
    for i in range(len(row)):
        greatest = max(greatest, abs(row[i]))
    return greatest
