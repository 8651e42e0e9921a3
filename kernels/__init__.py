"""Ops on the KV cache's memory and the model's activations, one op per file.

Owns the ops: each is a checking wrapper, a fast path per device and a plain-torch reference with the same signature
(reference.py). The wrapper picks by device: a fast torch path on the CPU, Triton on CUDA (gpu/), a typed error elsewhere.
attention/ and activations/ hold most ops; the modules here move and store blocks, sample, or are shared. Ops know tensors
only: no sequences, requests, grpc or config files. May import torch, numpy and triton, and nothing of the services.
"""
