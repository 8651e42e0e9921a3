"""What sharing saves where there is a prefix to share, and what it costs where there is none, with the 32 M parameter Llama.

Off means that the cache service runs without prefix caching: no look-up, no digests, nothing published. Both are up at once and
take turns, first one and then the other first, on prompts that are new every round; so all that the machine does meets both.
The first rounds do not count: with prefix caching they fill the pool, where the first touch of memory costs time, and
from then on every new block takes the place of a cached one.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import ask_all, both_services
from tests.benchmarks.llama import build_folder, random_prompt

_NUM_SHARING, _PREFIX_LEN = 32, 1024
_NUM_REQUESTS, _PROMPT_LEN, _NUM_NEW = 16, 128, 24
_NUM_BLOCKS, _NUM_WARM_UP, _NUM_ROUNDS = 416, 4, 20


def figures() -> Iterator[dict[str, object]]:
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        build_folder(Path(folder))
        flags = ("--model", folder, "--threads", "1")
        pool = ("--num-blocks", str(_NUM_BLOCKS))
        async with (
            both_services(*flags, cache_flags=pool) as (sharing, _),
            both_services(*flags, cache_flags=(*pool, "--no-prefix-caching")) as (plain, _),
        ):
            return [await _shared_prefix(sharing), await _no_reuse(sharing, plain)]


async def _shared_prefix(client: AsyncEngineClient) -> dict[str, object]:
    rng = np.random.default_rng(0)
    prefix = random_prompt(rng, _PREFIX_LEN)
    suffix_lens = rng.integers(8, 65, _NUM_SHARING)
    prompts = [np.concatenate((prefix, random_prompt(rng, length))) for length in suffix_lens]
    before = (await client.stats()).num_prefill_tokens
    await ask_all(client, prompts, [4] * _NUM_SHARING)
    computed = (await client.stats()).num_prefill_tokens - before
    least = _PREFIX_LEN + int(suffix_lens.sum())
    return {
        "case": "requests that share a new prefix, all at once",
        "requests": _NUM_SHARING,
        "prefix_tokens": _PREFIX_LEN,
        "prompt_tokens": sum(map(len, prompts)),
        "computed_tokens": computed,
        "least_tokens": least,
        "ratio": round(computed / least, 3),
        "ratio_aim": 1.15,
    }


async def _no_reuse(sharing: AsyncEngineClient, plain: AsyncEngineClient) -> dict[str, object]:
    ratios: list[float] = []
    for round_idx in tqdm(range(_NUM_WARM_UP + _NUM_ROUNDS), desc="no reuse", file=sys.stderr):
        rng = np.random.default_rng(1 + round_idx)
        prompts = [random_prompt(rng, _PROMPT_LEN) for _ in range(_NUM_REQUESTS)]
        took: dict[AsyncEngineClient, float] = {}
        for client in (sharing, plain) if round_idx % 2 else (plain, sharing):
            begin = time.perf_counter()
            await ask_all(client, prompts, [_NUM_NEW] * _NUM_REQUESTS)
            took[client] = time.perf_counter() - begin
        ratios.append(took[plain] / took[sharing])
    return {
        "case": "nothing to share",
        "requests": _NUM_REQUESTS,
        "prompt_tokens": _NUM_REQUESTS * _PROMPT_LEN,
        "new_tokens": _NUM_REQUESTS * _NUM_NEW,
        "baseline": "the same without prefix caching",
        "ratio": round(float(np.median(ratios[_NUM_WARM_UP:])), 3),
        "ratio_aim": 0.98,
        "ratio_quartiles": np.percentile(ratios[_NUM_WARM_UP:], (25, 75)).round(3).tolist(),
    }
