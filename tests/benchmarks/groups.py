"""What groups of layers save: blocks that a model of 5 windowed layers to each full one takes, and what its decodes cost.

A random Gemma 3 of 6 layers with windows of 512 reads a prompt of 8,192 tokens and goes on; both services, one thread. With
groups and without take turns. Bytes are of the blocks that the sequence holds while it decodes, as the cache service counts.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, GenerateOptions, Sampling
from tests.benchmarks.both_services import ask, both_services

_CONTEXT, _WINDOW, _NUM_LAYERS, _NUM_NEW, _NUM_ROUNDS = 8192, 512, 6, 65, 3
_VOCAB_SIZE, _AIM = 4096, 0.30


def figures() -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)
    bytes_held: dict[bool, int] = {}
    speeds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder, "model"))
        for turn in tqdm(range(2 * _NUM_ROUNDS), desc="groups", file=sys.stderr):
            grouped = turn % 2 == 1
            bytes_held[grouped], speed = asyncio.run(_measure(f"{folder}/model", grouped=grouped))
            speeds[grouped].append(speed)
    ratio = bytes_held[True] / bytes_held[False]
    yield {
        "context": _CONTEXT,
        "window": _WINDOW,
        "windowed_layers": f"{_NUM_LAYERS - 1} of {_NUM_LAYERS}",
        "mib_held": round(bytes_held[True] / 2**20, 2),
        "baseline": "--no-groups",
        "baseline_mib_held": round(bytes_held[False] / 2**20, 2),
        "ratio": round(ratio, 3),
        "aim": _AIM,
        "decode_per_second": round(float(np.median(speeds[True])), 1),
        "baseline_decode_per_second": round(float(np.median(speeds[False])), 1),
        "decode_ratio": round(float(np.median(np.array(speeds[True]) / np.array(speeds[False]))), 3),
    }


def _build(folder: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=_VOCAB_SIZE,
        num_hidden_layers=_NUM_LAYERS,
        sliding_window=_WINDOW,
        layer_types=["sliding_attention"] * (_NUM_LAYERS - 1) + ["full_attention"],
        max_position_embeddings=2 * _CONTEXT,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)


async def _measure(model: str, *, grouped: bool) -> tuple[int, float]:
    """Bytes of the blocks that a sequence of the context holds, and its decoded tokens a second."""
    prompt = np.random.default_rng(0).integers(3, _VOCAB_SIZE, _CONTEXT).astype(np.int32)
    flags = ["--model", model, "--threads", "1", *([] if grouped else ["--no-groups"])]
    async with both_services(*flags, cache_flags=("--pool-memory", "256MiB")) as (client, pools):
        await ask(client, prompt[:64], 8)  # warms up
        return await _decode(client, pools, prompt)


async def _decode(client: AsyncEngineClient, pools: AsyncCacheClient, prompt: np.ndarray) -> tuple[int, float]:
    """The pool is asked while the sequence decodes, which then goes on."""
    sampling = Sampling(max_tokens=_NUM_NEW, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    num_bytes, times, count = 0, list[float](), 0
    async with client.generate(prompt, GenerateOptions(sampling=sampling)) as chunks:
        async for chunk in chunks:
            count += len(chunk.token_ids)
            times.append(time.perf_counter())
            if not num_bytes and count >= _NUM_NEW // 2:
                (pool,) = (await pools.stats()).pools
                num_bytes = pool.num_referenced_blocks * pool.pool.block_bytes
    return num_bytes, (_NUM_NEW - 1) / (times[-1] - times[0])
