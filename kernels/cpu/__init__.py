"""The kernels that numba compiles for a CPU, for float32.

Owns loops and their launchers, and the switch for them. Rules. The wrappers in `kernels` import a launcher where
`compiled.serves` says so; else they compute with torch, which gives the same within rounding. numba is imported by the modules
of kernels and their parts alone, and these by the switch and quantised.py alone: an import takes a second, and it may not be
installed. A launcher trusts its arguments. May import numba, torch and the modules of kernels that are in no folder.
"""
