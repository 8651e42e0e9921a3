"""What this processor multiplies at full speed, without torch or numba: the start asks before either is imported."""

import os
from importlib.util import find_spec

_FEATURES = {"avx512bf16", "avx512bw", "avx512vl"}


def multiplies_bfloat16() -> bool:
    """Whether the compiled kernels have instructions for products of bfloat16; else these take longer than in float32."""
    if find_spec("llvmlite") is None:
        return False
    from llvmlite.binding import get_host_cpu_features

    # As numba has it: what is named, nothing for a processor without a name, else what the host says.
    named = os.environ.get("NUMBA_CPU_FEATURES", "" if os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic" else None)
    if named is not None:
        return {f"+{feature}" for feature in _FEATURES} <= set(named.split(","))
    try:
        found = get_host_cpu_features()
    except RuntimeError:
        return False
    return all(found.get(feature, False) for feature in _FEATURES)
