"""The kernel that runs others: a program of calls, one behind the other, in threads that meet between them."""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from .kernel_parts import ask, int64s_at, kernel


@intrinsic
def _call(typing_context, function, argument):
    """Call the C function void f(void *) at an address."""

    def generate(context, builder, signature, arguments):
        pointer = ir.IntType(8).as_pointer()
        of_type = ir.FunctionType(ir.VoidType(), [pointer])
        builder.call(builder.inttoptr(arguments[0], of_type.as_pointer()), [builder.inttoptr(arguments[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@kernel
def run_program(data):
    """Run calls [N, 3], a kernel, its arguments and what was taken of its work each; all threads share each."""
    args = carray(data, (5,), np.int64)
    barrier, num_calls = args[2], args[4]
    calls = int64s_at(args[3], 3 * num_calls)
    is_alone = args[0] == 0
    for place in range(0, 3 * num_calls, 3):
        _call(calls[place], calls[place + 1])
        if not is_alone:
            _call(barrier, np.int64(0))
        if is_alone or ask(args[0]) == 0:  # for the next run, which begins behind further barriers
            int64s_at(calls[place + 2], 1)[0] = 0
