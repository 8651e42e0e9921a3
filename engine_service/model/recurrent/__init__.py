"""Layers that read a state of fixed size instead of all tokens: gated delta nets, and the pages that hold their states.

Owns which layers of a config are recurrent (delta_config.py, which reads without torch), their arithmetic and weights, and
which states a step reads and writes. May import torch, the kernels, values, and of the model its checkpoint, its families and
its experts.
"""
