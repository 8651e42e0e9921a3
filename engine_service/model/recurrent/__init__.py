"""Layers that read a state of fixed size instead of all tokens: their kinds, and the pages that hold their states.

Owns which layers of a config are recurrent (recurrent_config.py, which reads without torch), the mixer of each kind with its
weights and arithmetic (mixer.py), and which states a step reads and writes. May import torch, the kernels, values, and of the
model its checkpoint, its families and its experts.
"""
