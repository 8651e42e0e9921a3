"""Attention over keys and values that are read through block tables.

Owns the wrappers for decode and prefill, their CPU paths and the rule of retention (which keys a query sees). May import the
modules of kernels that are in no folder, and kernels.gpu inside the branch for CUDA.
"""
