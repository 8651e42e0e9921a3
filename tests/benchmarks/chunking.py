"""How long a short request waits for its first token while long prompts are computed one after the other, in chunks and whole.

With the 32 M parameter Llama. Short requests come at random times, one at a time; a long prompt is always under way.
"""

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import ask, both_services
from tests.benchmarks.llama import build_folder, random_prompt

_LONG_LEN, _SHORT_LEN, _NUM_NEW = 1984, 32, 2
_NUM_SHORT = 32
_LONGEST_GAP_S = 0.1


def figures() -> Iterator[dict[str, object]]:
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        build_folder(Path(folder))
        for chunk_size in (512, 2048):
            async with both_services("--model", folder, "--threads", "1", "--chunk-size", str(chunk_size)) as (client, _):
                waits = np.array(await _waits(client, f"chunks of {chunk_size}")) * 1e3
            rows.append(
                {
                    "chunking": "512 tokens" if chunk_size < _LONG_LEN else "off",
                    "long_prompt_tokens": _LONG_LEN,
                    "short_prompt_tokens": _SHORT_LEN,
                    "requests": _NUM_SHORT,
                    "first_token_p50_ms": round(float(np.percentile(waits, 50)), 1),
                    "first_token_p99_ms": round(float(np.percentile(waits, 99)), 1),
                }
            )
    return rows


async def _waits(client: AsyncEngineClient, name: str) -> list[float]:
    """Seconds to the first token of each short request."""
    rng = np.random.default_rng(0)
    long = asyncio.create_task(_keep_computing(client))
    waits = []
    for _ in tqdm(range(_NUM_SHORT), desc=name, file=sys.stderr):
        await asyncio.sleep(rng.uniform(0, _LONGEST_GAP_S))
        waits.append((await ask(client, random_prompt(rng, _SHORT_LEN), _NUM_NEW)).first_token_seconds)
        if long.done():
            long.result()  # raises
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    return waits


async def _keep_computing(client: AsyncEngineClient) -> None:
    rng = np.random.default_rng(1)
    while True:
        await ask(client, random_prompt(rng, _LONG_LEN), 1)
