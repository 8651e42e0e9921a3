"""Tokens a second of one request with prompt look-up against without, with the demo model, where the output copies and not.

Two engines on one kind of cache service each, one thread each, take turns on the same requests.
"""

import asyncio
import sys
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import ask, both_services

_NUM_NEW, _NUM_ROUNDS = 192, 9
_LINES = "".join(f"    if name == 'key_{place}':\n        return values[{place}]\n" for place in range(12))
_COPYING = f"def find(name, values):\n{_LINES}    if name == 'key_"
_OTHER = "class Queue:\n    "  # sampled at a temperature at which the demo model rarely says a thing twice


def figures() -> Iterator[dict[str, object]]:
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    flags = ("--threads", "1")
    guesses = ("--speculation", "prompt-look-up")
    async with both_services(*flags, *guesses) as (guessing, _), both_services(*flags) as (plain, _):
        return [
            await _compare(guessing, plain, "the output copies its prompt", _COPYING, 0.0, 1.2),
            await _compare(guessing, plain, "the output copies nothing", _OTHER, 1.5, 0.97),
        ]


async def _compare(
    guessing: AsyncEngineClient, plain: AsyncEngineClient, case: str, prompt: str, temperature: float, aim: float
) -> dict[str, object]:
    rates: dict[AsyncEngineClient, list[float]] = {guessing: [], plain: []}
    before = await guessing.stats()
    for round_idx in tqdm(range(_NUM_ROUNDS + 1), desc=case, file=sys.stderr):
        for client in (guessing, plain) if round_idx % 2 else (plain, guessing):
            reply = await ask(client, prompt, _NUM_NEW, temperature=temperature, seed=round_idx)
            rates[client].append(_NUM_NEW / reply.seconds)
    after = await guessing.stats()
    ours, theirs = np.array(rates[guessing][1:]), np.array(rates[plain][1:])  # the first warms both up
    num_guessed = after.num_guessed_tokens - before.num_guessed_tokens
    return {
        "case": case,
        "new_tokens": _NUM_NEW,
        "per_second": round(float(np.median(ours)), 1),
        "baseline": "without speculation",
        "baseline_per_second": round(float(np.median(theirs)), 1),
        "ratio": round(float(np.median(ours / theirs)), 3),
        "ratio_aim": aim,
        "guessed_tokens": num_guessed,
        "kept_share": round((after.num_kept_guesses - before.num_kept_guesses) / max(num_guessed, 1), 3),
    }
