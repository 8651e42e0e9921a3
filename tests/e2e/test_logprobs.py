"""Log probabilities through both services, against the model's own logits worked out at once."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkeeper.client import GenerateOptions, OutputChunk, Sampling, TokenLogprobs
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from tests.support.models.tiny_models import (
    NumericsCase,
    build_model_folder,
    random_tokens,
    reference_logits,
    tiny_model,
)
from tests.support.processes.service_pair import BLOCK_SIZE, Services

PROMPT = random_tokens(3 * BLOCK_SIZE + 1, seed=5)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), tiny_model("llama"))


async def run(world: Services, folder: Path, sampling: Sampling, n: int = 1, **engine: object) -> list[list[OutputChunk]]:
    model = load_served_model(EngineConfig(model=str(folder), progress=False, block_size=BLOCK_SIZE))
    client = await world.client(await world.start_engine(model, **engine))
    chunks: list[list[OutputChunk]] = [[] for _ in range(n)]
    async for chunk in client.generate(PROMPT, GenerateOptions(n=n, sampling=sampling)):
        chunks[chunk.index].append(chunk)
    return chunks


def expect(found: list[TokenLogprobs], tokens: list[int], logits: torch.Tensor, num_top: int) -> None:
    """logits [n, vocab_size] predict tokens [n]."""
    wanted = logits.log_softmax(1)
    assert [one.token_id for one in found] == tokens
    for one, row in zip(found, wanted, strict=True):
        of_token = row[one.token_id]
        assert one.logprob == pytest.approx(float(of_token), abs=TOLERANCE)
        num_near = int((row - of_token).abs().lt(TOLERANCE).sum())
        assert abs(one.rank - 1 - int((row > of_token).sum())) <= num_near
        likeliest = row.topk(num_top).values.tolist() if num_top else []
        assert [value for _, value in one.top] == pytest.approx(likeliest, abs=TOLERANCE)
        assert [float(row[token]) for token, _ in one.top] == pytest.approx([value for _, value in one.top], abs=TOLERANCE)


@pytest.mark.parametrize("chunk_size", [2, 512])
async def test_of_new_tokens_and_of_the_prompt(world: Services, folder: Path, chunk_size: int) -> None:
    await world.start_cache()
    sampling = Sampling(max_tokens=6, temperature=0.8, seed=1, num_logprobs=3, num_prompt_logprobs=2, ignore_eos=True)
    outputs = await run(world, folder, sampling, n=2, chunk_size=chunk_size)
    for index, chunks in enumerate(outputs):
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        (logits,) = reference_logits(folder, (NumericsCase((*PROMPT, *tokens)),)).eager
        found = [one for chunk in chunks for one in chunk.logprobs]
        expect(found, tokens, logits[len(PROMPT) - 1 : -1], 3)
        of_prompt = [one for chunk in chunks for one in chunk.prompt_logprobs]
        if index == 0:
            assert of_prompt == list(chunks[0].prompt_logprobs), "all with the first chunk"
            expect(of_prompt, list(PROMPT[1:]), logits[: len(PROMPT) - 1], 2)
        else:
            assert of_prompt == []


async def test_the_prompt_is_computed_for_them_though_it_is_cached(world: Services, folder: Path) -> None:
    await world.start_cache()
    first = await run(world, folder, Sampling(max_tokens=2, temperature=0))
    again = await run(world, folder, Sampling(max_tokens=2, temperature=0, num_prompt_logprobs=0))
    assert [chunk.token_ids for chunk in first[0]] == [chunk.token_ids for chunk in again[0]]
    assert len(again[0][0].prompt_logprobs) == len(PROMPT) - 1
    assert not any(chunk.logprobs for chunk in (*first[0], *again[0])), "not asked for"


def test_a_preempted_prompt_tells_each_position_once() -> None:
    from kvkeeper.engine_service.outputs.generation import Generation
    from kvkeeper.engine_service.outputs.model_text import StopRules
    from kvkeeper.engine_service.values.request import Request
    from kvkeeper.engine_service.values.sampling_params import GREEDY

    made = [TokenLogprobsOf(position) for position in range(1, 6)]
    request = Request("r", np.arange(6, dtype=np.int32), 4)
    generation = Generation(request, GREEDY, 0, StopRules(), [], lambda chunk: None)
    for first, count in ((1, 2), (1, 2), (3, 1), (1, 5)):
        generation.take_prompt_logprobs(first, made[first - 1 : first - 1 + count])  # type: ignore[arg-type]
    assert generation._prompt_logprobs == made


@dataclasses.dataclass(frozen=True)
class TokenLogprobsOf:
    """Stands for the log probabilities of one position."""

    position: int
