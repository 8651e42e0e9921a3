"""Layers that keep a state instead of tokens: gated delta nets, and the pages of an arena as their states.

Owns the arithmetic of the rule, where its weights come from, and which pages a step reads and writes. Knows no sequence.
May import torch, kernels and values, and of the model its checkpoint, its families and its experts.
"""
