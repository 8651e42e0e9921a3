"""same_tokens: whether two engines on one device give the same greedy tokens, prompt by prompt.

Captured steps and plain ones, and batches that came together in another way, round differently. So two engines may part where
the next tokens are as good as alike, and what follows continues another text. The first token that differs is judged by the
log probabilities of the engine that is taken for right, and beside it how many prompts do not part at all.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvkeeper.client import AsyncEngineClient, GenerateOptions, Sampling
from tests.gpu.checks import Check

# Of a model with random weights logits have a spread of one, and the two likeliest of 128k tokens are 0.2 apart on average. In
# other batches bfloat16 moves them by 0.01 after 16 layers, so that 3 tokens in 100 part, by far less than 0.1; and of prompts
# with 16 tokens two in three are equal to the end. A token that was computed from something else is not among the likeliest.
NEAR_TIE = 0.1  # of log probabilities
LEAST_EQUAL = 0.35  # of the prompts
_NUM_TOLD = 4  # likeliest tokens, of each token
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 128, 16


@dataclass(frozen=True, slots=True)
class Output:
    """What a prompt was continued with. likeliest: by token the likeliest ones there, with their log probabilities."""

    token_ids: list[int] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)


async def outputs_of(client: AsyncEngineClient, vocab_size: int, *, is_told: bool) -> list[Output]:
    """Greedy, of prompts that are the same for each engine and have nothing in common.

    is_told: with the likeliest tokens. Graphs do not draw what is told, so the engine that is judged is not asked for them.
    """
    drawn = np.random.default_rng(7)
    prompts = [drawn.integers(3, vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(NUM_PROMPTS)]
    return await asyncio.gather(*(_output(client, prompt, is_told=is_told) for prompt in prompts))


async def _output(client: AsyncEngineClient, prompt: np.ndarray, *, is_told: bool) -> Output:
    sampling = Sampling(
        max_tokens=NEW_TOKENS,
        temperature=0.0,
        repetition_penalty=1.0,
        ignore_eos=True,
        num_logprobs=_NUM_TOLD if is_told else None,
    )
    output = Output()
    async with client.generate(prompt, GenerateOptions(sampling=sampling)) as chunks:
        async for chunk in chunks:
            output.token_ids.extend(chunk.token_ids)
            output.likeliest.extend(dict(one.top) for one in chunk.logprobs)
    return output


def judge(name: str, found: Sequence[Output], expected: Sequence[Output]) -> Check:
    """expected: with the likeliest tokens."""
    gaps = [gap for own, other in zip(found, expected, strict=True) if (gap := _gap(own, other)) is not None]
    equal, worst = 1 - len(gaps) / len(found), max(gaps, default=0.0)
    problems = [f"two tokens that are no near tie: at most {NEAR_TIE} apart"] if worst > NEAR_TIE else []
    problems += [f"at least {LEAST_EQUAL:.0%} of the prompts have to be equal"] if equal < LEAST_EQUAL else []
    return Check(name, not problems, {"equal_prompts": equal, "widest_gap": worst}, "; ".join(problems))


def _gap(found: Output, expected: Output) -> float | None:
    """How much likelier the expected token was at the first place that differs; None: there is none."""
    if len(found.token_ids) != len(expected.token_ids):
        return float("inf")
    for token, other, likeliest in zip(found.token_ids, expected.token_ids, expected.likeliest, strict=True):
        if token != other:
            return likeliest[other] - likeliest.get(token, float("-inf"))
    return None
