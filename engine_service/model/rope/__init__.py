"""Rotary position embeddings: what a config says of them, and the tables that turn queries and keys.

Owns the kinds of rotation (rope_config.py, which reads without torch) and the angles (rotary_table.py).
May import torch, and of the model its checkpoint and its families.
"""
