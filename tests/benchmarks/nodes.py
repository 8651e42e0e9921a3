"""Three nodes behind the real gateway: routing by what they have cached, which their events tell, against round robin.

The same requests, so many at once, in the same order, to nodes with empty caches, whose pools hold what is asked for together
and not each alone. Hit rate: cached tokens of all prompt tokens, as clients are told them. All runs on one machine's cores, so
a hit saves time for the requests of the other nodes as well. With TRACE=FILE the first requests of a recorded trace in
Mooncake's form are asked, too: each of its blocks stands for one of ours, and the longest prompts are cut.
"""

import asyncio
import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import openai

from tests.support.processes.nodes import Nodes, nodes
from tests.support.reference.workloads import Requests, multi_turn

_NUM_NODES, _AT_ONCE, _NUM_NEW = 3, 3, 4
_MOST_PARTS, _FUNCTIONS_EACH = 25, 3
_NUM_REQUESTS, _NUM_BLOCKS = 240, 1000
_NUM_TRACED, _NUM_BLOCKS_TRACED = 700, 4500
_POLICIES = ("round_robin", "cache_aware")
_TIMEOUT_S = 300.0


class _Reply(NamedTuple):
    first_token_seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int


def figures() -> Iterator[dict[str, object]]:
    for workload, (requests, num_blocks) in _workloads().items():
        rows = {policy: asyncio.run(_measure(policy, requests, num_blocks)) for policy in _POLICIES}
        baseline = rows[_POLICIES[0]]
        for policy, row in rows.items():
            ratios = {} if policy == _POLICIES[0] else {"ttft_p50_ratio": _ratio(row, baseline, "ttft_p50_ms")}
            world = {"workload": workload, "nodes": _NUM_NODES, "blocks_each": num_blocks, "policy": policy}
            yield {**world, **row, "most_hits": _most_hits(requests), **ratios}


def _workloads() -> dict[str, tuple[Requests, int]]:
    """And the blocks of each node."""
    found = {"multi_turn": (multi_turn(0, num_users=24, num_requests=_NUM_REQUESTS), _NUM_BLOCKS)}
    if path := os.environ.get("TRACE"):
        with open(path) as lines:
            traced = [json.loads(line)["hash_ids"] for line in itertools.islice(lines, _NUM_TRACED)]
        found["trace"] = traced, _NUM_BLOCKS_TRACED
    return found


async def _measure(policy: str, requests: Requests, num_blocks: int) -> dict[str, object]:
    async with nodes(_NUM_NODES, "--policy", policy, num_blocks=num_blocks) as world:
        await asyncio.gather(*(_ask(world, [-1, number]) for number in range(2 * _NUM_NODES)))  # warms them up
        waiting, replies = iter(requests), list[_Reply]()

        async def work() -> None:
            for parts in waiting:
                replies.append(await _ask(world, parts))

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    first = [reply.first_token_seconds * 1e3 for reply in replies]
    num_prompt_tokens = sum(reply.num_prompt_tokens for reply in replies)
    return {
        "requests": len(replies),
        "at_once": _AT_ONCE,
        "prompt_tokens": num_prompt_tokens,
        "hit_rate": round(sum(reply.num_cached_tokens for reply in replies) / num_prompt_tokens, 4),
        "ttft_p50_ms": round(float(np.percentile(first, 50)), 1),
        "ttft_p90_ms": round(float(np.percentile(first, 90)), 1),
    }


async def _ask(world: Nodes, parts: list[int]) -> _Reply:
    """parts: of the prompt, by number; equal numbers are equal texts."""
    prompt = "".join(map(_text, parts[:_MOST_PARTS]))
    async with openai.AsyncOpenAI(base_url=world.base_url, api_key="none", max_retries=0, timeout=_TIMEOUT_S) as client:
        begin, first, usage = time.perf_counter(), 0.0, None
        stream = await client.completions.create(
            model=world.model,
            prompt=prompt,
            max_tokens=_NUM_NEW,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            first = first or time.perf_counter() - begin
            usage = chunk.usage or usage
    assert usage is not None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
    return _Reply(first, usage.prompt_tokens, cached or 0)


def _text(part: int) -> str:
    return "".join(f"def f_{part}_{number}(x):\n    return x + {part}\n" for number in range(_FUNCTIONS_EACH))


def _most_hits(requests: Requests) -> float:
    """The hit rate of a cache that forgets nothing and is everywhere, by parts."""
    seen, num_known, num_all = set[tuple[int, ...]](), 0, 0
    for parts in requests:
        paths = [tuple(parts[:end]) for end in range(1, min(len(parts), _MOST_PARTS) + 1)]
        num_known += sum(path in seen for path in paths)
        num_all += len(paths)
        seen.update(paths)
    return round(num_known / num_all, 4)


def _ratio(row: dict[str, object], baseline: dict[str, object], name: str) -> float:
    return round(float(str(row[name])) / float(str(baseline[name])), 3)
