"""Speculation through both services: the same tokens, in fewer steps where the output copies its prompt."""

import asyncio
import dataclasses
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvkeeper.client import Sampling
from kvkeeper.common.service.process import StartError
from kvkeeper.engine_service import server
from kvkeeper.engine_service.compute.served_model import ServedModel
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.speculation.draft_model import DraftModel
from tests.support.models.tiny_models import build_model_folder, tiny_model
from tests.support.processes.service_pair import GREEDY, Services, generate, toy_output

LINES = "".join(f"    if name == 'key_{place}':\n        return values[{place}]\n" for place in range(12))
PROMPT = f"def find(name, values):\n{LINES}    if name == 'key_"


async def test_a_copying_output_takes_fewer_steps(world: Services, demo_model: ServedModel) -> None:
    await world.start_cache(num_blocks=200)
    sampling = dataclasses.replace(GREEDY, ignore_eos=True)
    plain = await world.client(await world.start_engine(demo_model, block_size=16))
    guessing = await world.client(await world.start_engine(demo_model, block_size=16, speculation="prompt-look-up"))
    expected = await generate(plain, PROMPT, 64, sampling, n=2)
    found = await generate(guessing, PROMPT, 64, sampling, n=2)
    assert found.token_ids == expected.token_ids
    stats = await guessing.stats()
    assert stats.num_kept_guesses > 0
    assert stats.acceptance_rate == pytest.approx(stats.num_kept_guesses / stats.num_guessed_tokens)
    assert stats.num_steps < (await plain.stats()).num_steps
    assert (await world.wait_idle()).num_referenced_blocks == 0


class SometimesRight:
    """Guesses what the toy would say greedily, with an error every now and then."""

    is_slow = False

    def __init__(self) -> None:
        self._dice = random.Random(3)

    def propose(self, histories: Mapping[int, np.ndarray], most: Mapping[int, int]) -> dict[int, np.ndarray]:
        found = {}
        for row, history in histories.items():
            guess = toy_output(history.tolist(), most[row])
            found[row] = np.array([token if self._dice.random() < 0.8 else 1 for token in guess], np.int32)
        return found


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(temperature=0.7, seed=11),
        Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=5, frequency_penalty=0.5, num_logprobs=1),
    ],
    ids=["greedy", "sampled", "penalised"],
)
async def test_the_tokens_are_the_same_to_the_last(
    world: Services, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the toy, where logits are exact in every batch: with a real model, rounding may tip a draw either way."""
    monkeypatch.setattr(server, "PromptLookUp", SometimesRight)
    plain = await world.serve(cache={"num_blocks": 200})
    guessing = await world.client(await world.start_engine(speculation="prompt-look-up"))
    for prompt in ([1, 2, 3], list(range(1, 14))):
        expected = await generate(plain, prompt, 60, sampling, n=3)
        assert (await generate(guessing, prompt, 60, sampling, n=3)).token_ids == expected.token_ids
    assert (await guessing.stats()).num_guessed_tokens > 0


async def test_outputs_without_a_pattern_are_as_they_were(world: Services) -> None:
    client = await world.serve(speculation="prompt-look-up")
    prompt = [7, 8, 7, 8, 7, 8, 7]
    assert (await generate(client, prompt, 40)).token_ids == [toy_output(prompt, 40)]


async def test_a_draft_model_guesses_and_changes_nothing(world: Services, demo_model: ServedModel, tmp_path: Path) -> None:
    """The same model as its own draft is always right, greedily; one with other weights hardly ever, and costs no token."""
    plain = await world.serve(demo_model, block_size=16, cache={"num_blocks": 200})
    blurred = tmp_path / "blurred"
    shutil.copytree(DEMO_MODEL_DIR, blurred)
    tensors = load_file(blurred / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in tensors.items()
    }
    save_file(noisy, blurred / "model.safetensors")
    prompts = [PROMPT, "import os\n", "class Tree:\n    def __init__(self"]
    greedy = dataclasses.replace(GREEDY, ignore_eos=True)
    expected = [(await generate(plain, prompt, 40, greedy)).token_ids for prompt in prompts]
    rates = []
    for draft in (DEMO_MODEL_DIR, blurred):
        engine = await world.start_engine(demo_model, block_size=16, speculation="draft-model", draft_model=str(draft))
        client = await world.client(engine)
        found = await asyncio.gather(*(generate(client, prompt, 40, greedy) for prompt in prompts))
        assert [output.token_ids for output in found] == expected
        rates.append((await client.stats()).acceptance_rate)
    assert rates[0] > 0.95
    assert rates[1] < 0.5 * rates[0]


async def test_a_draft_of_another_vocabulary_is_refused(world: Services, demo_model: ServedModel, tmp_path: Path) -> None:
    await world.start_cache()
    folder = build_model_folder(tmp_path, tiny_model("llama"))
    with pytest.raises(StartError, match="--draft-model: its vocabulary has 512 tokens"):
        await world.start_engine(demo_model, speculation="draft-model", draft_model=str(folder))
    with pytest.raises(StartError, match="--draft-model"):
        await world.start_engine(demo_model, speculation="draft-model", draft_model=str(tmp_path / "nothing"))


def test_more_sequences_than_places_are_guessed_for_in_part(demo_model: ServedModel) -> None:
    draft = DraftModel(demo_model, 128)
    histories = {row: np.arange(5 + row, dtype=np.int32) for row in range(20)}
    first = draft.propose(histories, dict.fromkeys(histories, 3))
    assert len(first) == 16
    assert all(len(guess) == 3 for guess in first.values())
    for (
        row,
        guess,
    ) in first.items():  # a sequence that had a place keeps it, and what it computed equals computing it again
        again = DraftModel(demo_model, 128).propose({row: histories[row]}, {row: 3})
        assert again[row].tolist() == guess.tolist()
    assert draft.propose(histories, dict.fromkeys(histories, 3)).keys() == first.keys()
    longest = np.arange(127, dtype=np.int32)
    assert len(draft.propose({0: longest}, {0: 4})[0]) == 1, "no further than it can count"
