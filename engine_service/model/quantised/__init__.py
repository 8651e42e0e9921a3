"""Checkpoints whose projections are stored in 8 or 4 bit: what config.json says of it, and the weights that are meant.

Owns the formats of the hub: which tensors stand for a weight, and how its numbers lie in them. Unpickles nothing. May import
model/checkpoint; scheme.py is read without torch.
"""
