"""Rules about single tokens through both services: each holds, against a naive reference, on every path that draws tokens."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvkeeper.client import AsyncEngineClient, BeamSearch, GenerateOptions, Sampling
from kvkeeper.engine_service import server
from kvkeeper.engine_service.compute import step_compute
from kvkeeper.engine_service.compute.served_model import ServedModel
from kvkeeper.engine_service.model.hash_toy import expected_next_token
from tests.support.processes.service_pair import GREEDY, Output, Services, generate, services, toy_output
from tests.support.stand_ins.late_queue import LateQueue
from tests.support.worlds.cache_api import failure

VOCAB = 512
PROMPT = [5, 6, 7, 8, 9]
FREE = toy_output(PROMPT, 24)


def reference(prompt: Sequence[int], num_tokens: int, sampling: Sampling) -> list[int]:
    """What the toy says greedily under rules: 30 for its next token, 0 for the others, and the first of the likeliest."""
    output: list[int] = []
    while len(output) < num_tokens:
        logits = np.zeros(VOCAB)
        logits[expected_next_token([*prompt, *output])] = 30
        for token, amount in sampling.logit_bias.items():
            logits[token] += amount
        if sampling.allowed_token_ids:
            logits[[token for token in range(VOCAB) if token not in sampling.allowed_token_ids]] = -np.inf
        for *before, last in sampling.bad_words_token_ids:
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                logits[last] = -np.inf
        if len(output) < sampling.min_tokens:
            logits[list(sampling.stop_token_ids)] = -np.inf
        token = int(logits.argmax())
        if token in sampling.stop_token_ids:
            break
        output.append(token)
    return output


RULES: dict[str, Sampling] = {
    "bias against": replace(GREEDY, logit_bias={FREE[2]: -100, FREE[5]: -31.0, 40: 0.5}),
    "bias for": replace(GREEDY, logit_bias={44: 30.5, FREE[1]: 1}),
    "bad tokens": replace(GREEDY, bad_words_token_ids=[[FREE[0]], [0], [1]]),
    "bad pairs": replace(GREEDY, bad_words_token_ids=[FREE[0:2], [0, 0], [0, 1], [0, 2, 0]]),
    "bad runs": replace(GREEDY, bad_words_token_ids=[FREE[3:7], FREE[8:10], [0] * 6]),
    "allowed": replace(GREEDY, allowed_token_ids=(9, 7, 200, *FREE[4:7]), bad_words_token_ids=[[7, 7], [7, 9, 7]]),
    "not before": replace(GREEDY, stop_token_ids=(FREE[3], FREE[6], 0), min_tokens=9),
    "at once": replace(GREEDY, stop_token_ids=(FREE[9], 0), min_tokens=9),
    "all": replace(
        GREEDY, logit_bias={FREE[1]: -50}, bad_words_token_ids=[[0], [1, 1]], stop_token_ids=(FREE[0],), min_tokens=12
    ),
}
NUM_NEW = 24


def check(found: Mapping[str, Output]) -> None:
    for name, output in found.items():
        assert output.token_ids == [reference(PROMPT, NUM_NEW, RULES[name])] * len(output.token_ids), name
        assert set(output.reasons) <= {"length", "stop"}


async def ask_all(client: AsyncEngineClient, **options: Any) -> dict[str, Output]:
    """All at once, beside a request without rules, whose tokens they do not change."""
    *found, plain = await asyncio.gather(
        *(generate(client, PROMPT, NUM_NEW, sampling, **options) for sampling in RULES.values()),
        generate(client, PROMPT, NUM_NEW),
    )
    assert plain.token_ids == [FREE]
    return dict(zip(RULES, found, strict=True))


def test_the_rules_show() -> None:
    found = {name: reference(PROMPT, NUM_NEW, sampling) for name, sampling in RULES.items()}
    assert FREE not in found.values()
    assert len(found["not before"]) >= 9 == len(found["at once"])


@pytest.mark.parametrize("num_blocks", [400, 44], ids=["room", "short of blocks"])
@pytest.mark.parametrize("queue", ["host", "late"])
async def test_steps_that_run_ahead_and_steps_that_wait(monkeypatch: pytest.MonkeyPatch, queue: str, num_blocks: int) -> None:
    if queue == "late":
        monkeypatch.setattr(step_compute, "HostQueue", LateQueue)
    for overlap in (True, False):
        async with services() as world:
            client = await world.serve(overlap=overlap, cache={"num_blocks": num_blocks})
            check(await ask_all(client))
            assert num_blocks == 400 or (await client.stats()).num_preemptions > 0
            assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_several_continuations(world: Services) -> None:
    check(await ask_all(await world.serve(cache={"num_blocks": 400}), n=3))


class Stubborn:
    """Guesses what the toy would say without rules, and then what rules forbid."""

    is_slow = False

    def propose(self, histories: Mapping[int, np.ndarray], most: Mapping[int, int]) -> dict[int, np.ndarray]:
        return {row: np.array(toy_output(history.tolist(), most[row]), np.int32) for row, history in histories.items()}


async def test_guesses_obey(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PromptLookUp", Stubborn)
    client = await world.serve(speculation="prompt-look-up", cache={"num_blocks": 400})
    check(await ask_all(client, n=2))
    stats = await client.stats()
    assert 0 < stats.num_kept_guesses < stats.num_guessed_tokens


async def test_drawn_tokens_and_their_log_probabilities(world: Services) -> None:
    client = await world.serve(cache={"num_blocks": 400})
    rules = {"allowed_token_ids": (3, 4, 5), "bad_words_token_ids": [[3, 3], [5]], "logit_bias": {4: 2.0}}
    sampling = replace(GREEDY, temperature=1.0, seed=1, num_logprobs=1, **rules)
    output = await generate(client, PROMPT, 60, sampling, n=4)
    for tokens in output.token_ids:
        assert set(tokens) == {3, 4}
        assert (3, 3) not in itertools.pairwise(tokens)
        assert tokens.count(4) > 2 * tokens.count(3)


async def test_beams_end_where_no_token_is_left(world: Services) -> None:
    client = await world.serve()
    one = replace(GREEDY, allowed_token_ids=(4,))
    alone = await generate(client, PROMPT, 5, one, beam_search=BeamSearch(3))
    assert alone.token_ids == [[4] * 5]
    error = await failure(generate(client, PROMPT, 5, one, n=2, beam_search=BeamSearch(3)))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "sampling")
    for options in ({}, {"n": 2}, {"beam_search": BeamSearch(3)}):
        error = await failure(generate(client, PROMPT, 5, replace(one, bad_words_token_ids=[[4, 4]]), **options))
        assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "sampling")
    assert (await generate(client, PROMPT, NUM_NEW)).token_ids == [FREE]


async def test_texts(world: Services, demo_model: ServedModel) -> None:
    """Words are forbidden where a text begins with them and behind a blank; stop strings wait."""
    client = await world.serve(demo_model, block_size=16)
    text = "import os\nimport sys\n\n\ndef main():\n    "
    greedy = replace(GREEDY, ignore_eos=True)
    free = await generate(client, text, 40, greedy)
    tokens = free.token_ids[0]
    words = {await client.detokenize([token], keep_special_tokens=True) for token in tokens}
    word = max((word.strip() for word in words), key=len)
    found = await generate(client, text, 40, replace(greedy, bad_words=(word,)))
    forbidden = {tuple(await client.tokenize(form)) for form in (word, f" {word}")}
    added = tuple(await client.tokenize(""))
    spelled = [form[len(added) :] for form in forbidden]
    runs = {tuple(found.token_ids[0][at : at + len(form)]) for form in spelled for at in range(40)}
    assert not runs.intersection(spelled)
    assert found.texts != free.texts

    stop = free.texts[0][3:6]
    for min_tokens in (1, 20, 39):
        held = await generate(client, text, 40, replace(greedy, stop=(stop,), min_tokens=min_tokens))
        assert len(held.token_ids[0]) >= min_tokens
        assert held.token_ids[0] == tokens[: len(held.token_ids[0])]
        assert free.texts[0].startswith(held.texts[0])
    eos = await generate(client, text, 40, replace(greedy, ignore_eos=False, logit_bias={tokens[0]: -1}, min_tokens=40))
    assert (len(eos.token_ids[0]), eos.reasons) == (40, ["length"])


async def test_an_absent_limit_leaves_room_for_the_fewest(world: Services) -> None:
    client = await world.serve(cache={"num_blocks": 400})
    sampling = replace(GREEDY, max_tokens=None, min_tokens=300)
    tokens = [token async for chunk in client.generate(PROMPT, GenerateOptions(sampling=sampling)) for token in chunk.token_ids]
    assert len(tokens) == 300


async def test_a_constraint_and_rules_hold_together(world: Services, demo_model: ServedModel) -> None:
    client = await world.serve(demo_model, block_size=16)
    digits = [await client.tokenize(letter) for letter in "0123"]
    zero, one, two, three = (ids[-1] for ids in digits)
    sampling = replace(GREEDY, regex="[0-3]{6}", bad_words_token_ids=[[zero]], logit_bias={one: 100})
    output = await generate(client, "x = ", 20, replace(sampling, allowed_token_ids=(zero, one, two)))
    assert (output.texts, output.reasons) == (["111111"], ["stop"])
    runs = replace(sampling, allowed_token_ids=(one, three), bad_words_token_ids=[[one, one], [three, three]], min_tokens=6)
    assert (await generate(client, "x = ", 20, runs)).texts == ["131313"]
    error = await failure(generate(client, "x = ", 20, replace(sampling, allowed_token_ids=(zero, 200))))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "sampling")
