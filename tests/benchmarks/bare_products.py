"""The bound of the engine's figures: the matrix products of the decoder for the batches of a run, and nothing else.

That is the four products of each layer (queries, keys and values in one; the output; gate and up in one; down) and the one
with the vocabulary, with random weights of the same shapes, packed as the engine packs them, in the same number of threads. As
in the decoder, what follows the last layer's attention is computed for tokens that have logits only. Attention itself, norms,
rotation, gates, embedding, sampling, both services and the client are not in it.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.types import LinearWeight
from tests.benchmarks.llama import VOCAB_SIZE

_NUM_LAYERS, _HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS = 8, 512, 1408, 512, 512


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens of a forward pass, and those of them with logits."""

    num_tokens: int
    num_logits: int


class BareProducts:
    """Weights of one model. run() computes nothing of use."""

    def __init__(self) -> None:
        self._qkv = [_weight(_HIDDEN, _HEADS + _KV_HEADS) for _ in range(_NUM_LAYERS)]
        rest = ((_HEADS, _HIDDEN), (_HIDDEN, 2 * _INTERMEDIATE), (_INTERMEDIATE, _HIDDEN))
        self._rest = [[_weight(*shape) for shape in rest] for _ in range(_NUM_LAYERS)]
        self._lm_head = _weight(_HIDDEN, VOCAB_SIZE)

    @torch.inference_mode()
    def seconds(self, steps: Iterable[Step]) -> float:
        """To compute the products of these steps, one after the other."""
        inputs = {width: torch.randn(1, width) for width in (_HIDDEN, _INTERMEDIATE)}
        total = 0.0
        for step in steps:
            x = {width: row.expand(step.num_tokens, -1).contiguous() for width, row in inputs.items()}
            last = {width: rows[: step.num_logits] for width, rows in x.items()}
            begin = time.perf_counter()
            for index, (qkv, rest) in enumerate(zip(self._qkv, self._rest, strict=True)):
                linear(x[_HIDDEN], qkv)
                for weight in rest:
                    linear((last if index + 1 == _NUM_LAYERS else x)[weight.data.shape[1]], weight)
            linear(last[_HIDDEN], self._lm_head)
            total += time.perf_counter() - begin
        return total


def _weight(num_in: int, num_out: int) -> LinearWeight:
    return pack_linear(LinearWeight(torch.randn(num_out, num_in)))
