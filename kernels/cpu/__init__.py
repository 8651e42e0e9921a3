"""The kernels that numba compiles for a CPU, for float32 and bfloat16, and of products for 8-bit integers.

Owns loops and their launchers, the switch for them, and programs of them, which run in one call. Rules. The wrappers in
`kernels` import a launcher where `compiled.serves` says so; else they compute with torch, which gives the same within rounding.
numba is imported by the modules of kernels and their parts alone, and these by the switch alone: an import takes a second, and
it may not be installed. A launcher trusts its arguments. May import numba, torch and the modules of kernels that are in no
folder.
"""
