"""The ground of the engine service: what its folders hand each other.

Owns plain values: requests and their sequences, batches, sampling parameters, log probabilities, output chunks, errors.
May import numpy and the standard library; knows no torch, grpc, asyncio or clock.
"""
