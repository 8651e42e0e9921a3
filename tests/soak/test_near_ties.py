"""What passes as a near tie, and that nothing else does."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvkeeper.client import Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.kernels.philox import uniforms
from tests.soak.near_ties import BORDER, GAP, check_near_tie

BEFORE = [5, 6, 7, 8]
INDEX = 2
SEEDS = np.arange(400_000, dtype=np.uint64)


@pytest.fixture(scope="module")
def ends() -> np.ndarray:
    """Where each token's range of the drawn number ends, float64 [vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
    with torch.inference_mode():
        return torch.softmax(model(torch.tensor([BEFORE])).logits[0, -1].double() / 0.8, -1).cumsum(-1).numpy()


def numbers() -> np.ndarray:
    """What is drawn with each of SEEDS, float64."""
    return uniforms(SEEDS, np.full_like(SEEDS, INDEX), np.full_like(SEEDS, len(BEFORE)))


def check(seed: int, expected: int, found: int) -> float:
    return check_near_tie(BEFORE, Sampling(temperature=0.8, seed=seed), INDEX, 0.0, expected, found)


def test_either_side_of_a_border_passes_and_what_lies_beyond_does_not(ends: np.ndarray) -> None:
    drawn = numbers()
    token = int(np.diff(ends, prepend=0.0)[1:-2].argmax()) + 1  # so likely that no other border is near
    seed = int(SEEDS[np.abs(drawn - ends[token]).argmin()])
    assert abs(drawn[seed] - ends[token]) < BORDER / 4
    behind = int(np.searchsorted(ends, ends[token] + 2 * BORDER))
    assert check(seed, token, token + 1) < BORDER
    with pytest.raises(AssertionError, match=f"token 4 is {behind + 1} and not {token}, and the drawn number is"):
        check(seed, token, behind + 1)


def test_a_number_off_the_border_decides(ends: np.ndarray) -> None:
    token = int(np.diff(ends, prepend=0.0)[1:-2].argmax()) + 1
    seed = int(SEEDS[np.abs(numbers() - (ends[token] + ends[token - 1]) / 2).argmin()])
    assert check(seed, token, token) == 0.0
    for other in (token - 1, token + 1):
        with pytest.raises(AssertionError, match="the drawn number is"):
            check(seed, token, other)


def test_greedy_tokens_are_judged_by_the_likeliest_two() -> None:
    greedy = Sampling(temperature=0.0)
    assert check_near_tie(BEFORE, greedy, 0, GAP / 2, 1, 2) == GAP / 2
    with pytest.raises(AssertionError, match=r"the likeliest two are 0\.5 apart"):
        check_near_tie(BEFORE, greedy, 0, 0.5, 1, 2)
