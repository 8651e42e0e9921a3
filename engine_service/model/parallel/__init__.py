"""A model on several ranks: which part of it each of them has.

Owns the arithmetic of heads, widths, rows and columns. May import torch, and of the model its config and its errors.
"""
