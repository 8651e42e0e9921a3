"""Steps of sessions under one load, a bare gRPC echo of messages of the same size, and vLLM's manager, in turns.

So all meet the same machine. After each turn comes a pause, in which a device would work: what the cache service leaves for
after its answer is done then, and slows down no other turn. The client's encoding and decoding are part of our time and not of
the echo's. Sequences that start are created before their step, as an engine does when a request arrives.
"""

import asyncio
import os
import time
from typing import Any

import grpc
import numpy as np

from kvkeeper.client.cache import AsyncCacheSession
from kvkeeper.client.steps import StepItems, encode
from tests.benchmarks.echo_server import METHOD, SIZE_KEY
from tests.benchmarks.growing import BLOCK_SIZE
from tests.benchmarks.sessions import Load, create
from tests.benchmarks.vllm_manager import VllmManager, why_not

_PAUSE = 0.001  # seconds


class Turns:
    """Microseconds of each counted step, by taker of turns. Those of sessions are named by the prefix of their figures."""

    def __init__(self, load: Load, num_warm_up: int, num_steps: int) -> None:
        """num_steps: those that count, where a step fills a block, and others; num_warm_up go before."""
        self._load, self._num_warm_up, self._num_all = load, num_warm_up, num_warm_up + num_steps
        self._echo: list[float] = []
        self._peer: list[float] = []
        self._ours: dict[str, list[float]] = {}

    async def take(self, sessions: dict[str, AsyncCacheSession], echo: grpc.aio.Channel, has_peer: bool) -> None:
        """All steps. Each session has started the sequences of the load, the i-th of them with seed i."""
        load, takers = self._load, list(sessions.values())
        times: list[list[float]] = [[] for _ in takers]
        self._ours = dict(zip(sessions, times, strict=True))
        peer = None
        if has_peer:
            peer = VllmManager(load.num_blocks(self._num_all), BLOCK_SIZE)
            peer.start(list(zip(load.ids.tolist(), load.prompts(), strict=True)))
        message = bytes(len(encode(StepItems(**load.grow_columns(0)), takers[0].session_id, takers[0].epoch, 2, 1)))
        open_call: Any = echo.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
        call = open_call(metadata=((SIZE_KEY, str(_reply_size(load))),))
        for step_idx in range(self._num_all):
            created, items = load.created(step_idx), StepItems(**load.grow_columns(step_idx))
            counts = step_idx >= self._num_warm_up and load.fills(step_idx)
            for seed, (session, took) in enumerate(zip(takers, times, strict=True)):
                await create(session, created, seed)
                if created:
                    await asyncio.sleep(_PAUSE)
                begin = time.perf_counter()
                await session.step(items)
                if counts:
                    took.append((time.perf_counter() - begin) * 1e6)
                await asyncio.sleep(_PAUSE)
            begin = time.perf_counter()
            await call.write(message)
            await call.read()
            echo_us = (time.perf_counter() - begin) * 1e6
            peer_us = peer.step(items, created) if peer is not None else 0.0
            await asyncio.sleep(_PAUSE)
            if counts:
                self._echo.append(echo_us)
                if peer is not None:
                    self._peer.append(peer_us)
        await call.done_writing()

    def figure(self) -> dict[str, object]:
        figure: dict[str, object] = {}
        for prefix, times in self._ours.items():
            figure |= _quartiles(prefix, times)
        figure |= {"baseline": "stream echo of the same sizes", **_quartiles("baseline_", self._echo)}
        figure |= {f"{prefix}ratio": _ratio(times, self._echo) for prefix, times in self._ours.items()}
        if self._peer:
            figure |= {"peer": "vllm", **_quartiles("peer_", self._peer)}
            figure |= {f"{prefix}ratio_to_peer": _ratio(times, self._peer) for prefix, times in self._ours.items()}
        return figure


def peer_or_reason() -> tuple[bool, str | None]:
    """Whether PEER asks for vLLM's manager and there is one; where it asks in vain, why there is none."""
    wanted = os.environ.get("PEER", "")
    if wanted not in ("", "vllm"):
        raise SystemExit(f"PEER={wanted}: the one peer is vllm")
    reason = why_not() if wanted else None
    return bool(wanted) and reason is None, reason


def fills_each_step(load: Load) -> bool:
    """Whether each step fills a block; where not, most steps do not count."""
    return all(map(load.fills, range(BLOCK_SIZE)))


def _reply_size(load: Load) -> int:
    """Bytes of an answer as the load gets it: a number per sequence, two per new block, tables of starts."""
    num_new = load.num_sequences // BLOCK_SIZE if fills_each_step(load) else load.num_sequences
    start_bytes = sum(20 + 4 * -(-len(prompt) // BLOCK_SIZE) for _, prompt in load.created(0))
    return 4 * load.num_sequences + 8 * num_new + start_bytes + 40


def _quartiles(prefix: str, times: list[float]) -> dict[str, object]:
    low, middle, high = np.percentile(times, (25, 50, 75))
    return {
        f"{prefix}median_us": round(float(middle), 1),
        f"{prefix}quartiles_us": [round(float(low), 1), round(float(high), 1)],
    }


def _ratio(times: list[float], others: list[float]) -> float:
    return round(float(np.median(times) / np.median(others)), 3)
