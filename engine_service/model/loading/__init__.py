"""From stored tensors to the weights that a rank computes with: where each goes, when a layer is whole, and how it is packed.

Knows no file: the loader reads them, and `checkpoint` says how they are stored.
"""
