"""Models whose K and V are stored in another format than they are computed in, and what that costs in quality.

Owns which format and which tail a model is given, what is refused, and the measurement of perplexity, needles and attention.
Knows no session. May import torch, numpy, structlog, the runner and the configuration above it, the model and the kernels.
"""
