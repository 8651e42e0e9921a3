"""Models that the engine runs itself: decoder-only transformers from a Hugging Face folder, and a toy for tests.

Knows torch, the kernels and files; knows no grpc, request or scheduler.
"""
