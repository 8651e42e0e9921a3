"""Two tokens of which either may come: where the demo model computes the same in other batches, it rounds differently.

Greedy, the two likeliest may be alike, within GAP of each other's log probability. Drawn, the number may lie on the border
between two tokens, within BORDER by the probabilities of the transformers library.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvkeeper.client import Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.kernels.philox import uniforms

GAP = 1e-4
BORDER = 1e-5


def check_near_tie(before: Sequence[int], sampling: Sampling, index: int, gap: float, expected: int, found: int) -> float:
    """How far apart the two tokens are; asserts that either may come.

    before: the tokens that it follows. index: of the continuation. gap: between the log probabilities of the two likeliest.
    """
    text = f"token {len(before)} is {found} and not {expected}"
    if not sampling.temperature:
        assert gap < GAP, f"{text}, of which the likeliest two are {gap} apart"
        return gap
    off = _off_border(before, sampling, index, expected, found)
    assert off < BORDER, f"{text}, and the drawn number is {off} off"
    return off


def _off_border(before: Sequence[int], sampling: Sampling, index: int, *drawn: int) -> float:
    """How far the number with which the next token was drawn lies from the range of each drawn token, at most.

    Both ranges have it where it lies on the border between them.
    """
    with torch.inference_mode():
        logits = _model()(torch.tensor([list(before)])).logits[0, -1].double()
    ends = [0.0, *torch.softmax(logits / sampling.temperature, -1).cumsum(-1).tolist()]
    seed, sample_idx, place = (np.array([value], np.uint64) for value in (sampling.seed, index, len(before)))
    number = float(uniforms(seed, sample_idx, place)[0])
    return max(max(ends[token] - number, number - ends[token + 1], 0.0) for token in drawn)


@cache
def _model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
