"""From stored tensors to the weights that a rank computes with.

Owns where each stored tensor goes (weight_map.py), when a layer is allocated and when it is whole (filling.py), and what is
done to it then (packing.py). Reads no file: the loader does. May import torch, the kernels, and all of the model but the loader
of a folder.
"""
