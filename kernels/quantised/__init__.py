"""K and V in fewer bits than they are computed in: how they are stored, and attention that reads them as they are.

Owns the formats, the layout of a block of them, and the ops on such blocks: store, read, decode, prefill. A block may stand
beside 16-bit pages of the newest tokens (the tail), and one call reads both. Each op has a plain path in torch and fast ones.
Knows no sequence. May import torch, numpy and the kernels beside it.
"""
