"""What a step costs the host on a device, taken out of it: captured graphs, and the warm-up before them.

Owns the sizes that are captured, the fixed memory that a graph reads, and the choice between a graph and a plain forward pass.
How a graph is captured and replayed is handed in (GraphApi): torch's on a device, a recorder in tests. Knows no session,
sequence or request. May import torch, numpy, tqdm, the values, the sampler beside it and the kernels.
"""
