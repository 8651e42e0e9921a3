"""One torch thread: the tensors are tiny, and test runs share their cores."""

import torch

torch.set_num_threads(1)
