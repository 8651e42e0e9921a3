"""Ops on the KV cache's memory and the model's activations, one op per file.

An op is a checking wrapper, a fast path per device and a plain-torch reference with the same signature (reference.py).
The wrapper picks by device: CPU -> a fast torch path; CUDA -> Triton (gpu/); elsewhere a typed error. Ops know
tensors only: no sequences, requests, grpc or config files.
"""
