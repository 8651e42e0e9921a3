"""Ops on the activations of tokens, which need no KV memory.

Owns products, norms, rotations and gates. May import the modules of kernels that are in no folder, and kernels.gpu inside
the branch for CUDA.
"""
