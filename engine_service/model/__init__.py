"""Models that the engine runs itself: decoder-only transformers from a Hugging Face folder, and a toy for tests.

Owns configs, weights and forward passes. May import torch, the kernels and values; knows no grpc, request or scheduler.
"""
