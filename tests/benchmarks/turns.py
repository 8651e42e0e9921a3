"""Steps of sessions under one load, a bare gRPC echo of messages of the same size, and vLLM's manager, in turns.

So all meet the same machine, and each comes after each of the others equally often. After each turn comes a pause, in which a
device would work: what the cache service leaves for after its answer is done then, and slows down no other turn. The client's
encoding and decoding are part of our time and not of the echo's. Sequences that start are created before their step, as an
engine does when a request arrives.
"""

import asyncio
import gc
import os
import time
from typing import Any, Protocol

import grpc
import numpy as np

from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems, encode
from tests.benchmarks.echo_server import METHOD, SIZE_KEY
from tests.benchmarks.growing import BLOCK_SIZE
from tests.benchmarks.sessions import Load, create
from tests.benchmarks.vllm_manager import VllmManager, why_not

_PAUSE = 0.001  # seconds
_ECHO, _PEER = "baseline_", "peer_"


class Turns:
    """Microseconds of each counted step, by taker of turns. Those of sessions are named by the prefix of their figures."""

    def __init__(self, load: Load, num_warm_up: int, num_steps: int) -> None:
        """num_steps: those that count, where a step fills a block, and others; num_warm_up go before."""
        self._load, self._num_warm_up, self._num_all = load, num_warm_up, num_warm_up + num_steps
        self._times: dict[str, list[float]] = {}

    async def take(self, sessions: dict[str, AsyncCacheSession], echo: grpc.aio.Channel, has_peer: bool) -> None:
        """All steps. Each session has started the sequences of the load, the i-th of them with seed i."""
        load, (first, *_) = self._load, sessions.values()
        takers: dict[str, _Taker] = {name: _Session(session, seed) for seed, (name, session) in enumerate(sessions.items())}
        request = encode(StepItems(**load.grow_columns(0)), first.session_id, first.epoch, 2, 1)
        takers[_ECHO] = bare = _Echo(echo, len(request), _reply_size(load))
        if has_peer:
            takers[_PEER] = _Peer(load, self._num_all)
        self._times = {name: [] for name in takers}
        gc.collect()
        gc.freeze()  # the modules and objects of one taker are not looked through in the turn of another
        names = list(takers)
        for step_idx in range(self._num_all):
            created, items = load.created(step_idx), StepItems(**load.grow_columns(step_idx))
            counts = step_idx >= self._num_warm_up and load.fills(step_idx)
            turn = step_idx % len(names)
            for name in names[turn:] + names[:turn]:
                took = await takers[name].turn(items, created)
                await asyncio.sleep(_PAUSE)
                if counts:
                    self._times[name].append(took)
        gc.unfreeze()
        await bare.end()

    def figure(self) -> dict[str, object]:
        figure: dict[str, object] = {}
        ours = [name for name in self._times if name not in (_ECHO, _PEER)]
        for name in ours:
            figure |= self._quartiles(name)
        figure |= {"baseline": "stream echo of the same sizes", **self._quartiles(_ECHO)}
        figure |= {f"{name}ratio": self._ratio(name, _ECHO) for name in ours}
        if _PEER in self._times:
            figure |= {"peer": "vllm", **self._quartiles(_PEER)}
            figure |= {f"{name}ratio_to_peer": self._ratio(name, _PEER) for name in ours}
        return figure

    def _quartiles(self, name: str) -> dict[str, object]:
        low, middle, high = np.percentile(self._times[name], (25, 50, 75))
        return {
            f"{name}median_us": round(float(middle), 1),
            f"{name}quartiles_us": [round(float(low), 1), round(float(high), 1)],
        }

    def _ratio(self, name: str, other: str) -> float:
        return round(float(np.median(self._times[name]) / np.median(self._times[other])), 3)


class _Taker(Protocol):
    async def turn(self, items: StepItems, created: list[tuple[int, np.ndarray]]) -> float:
        """Microseconds of one step, which starts the sequences `created`."""


class _Session:
    def __init__(self, session: AsyncCacheSession, seed: int) -> None:
        self._session, self._seed = session, seed

    async def turn(self, items: StepItems, created: list[tuple[int, np.ndarray]]) -> float:
        if created:
            await create(self._session, created, self._seed)
            await asyncio.sleep(_PAUSE)
        begin = time.perf_counter()
        await self._session.step(items)
        return (time.perf_counter() - begin) * 1e6


class _Echo:
    def __init__(self, channel: grpc.aio.Channel, request_size: int, reply_size: int) -> None:
        open_call: Any = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
        self._call = open_call(metadata=((SIZE_KEY, str(reply_size)),))
        self._message = bytes(request_size)

    async def turn(self, items: StepItems, created: list[tuple[int, np.ndarray]]) -> float:
        begin = time.perf_counter()
        await self._call.write(self._message)
        await self._call.read()
        return (time.perf_counter() - begin) * 1e6

    async def end(self) -> None:
        await self._call.done_writing()


class _Peer:
    def __init__(self, load: Load, num_steps: int) -> None:
        self._manager = VllmManager(load.num_blocks(num_steps), BLOCK_SIZE)
        self._manager.start(list(zip(load.ids.tolist(), load.prompts(), strict=True)))

    async def turn(self, items: StepItems, created: list[tuple[int, np.ndarray]]) -> float:
        return self._manager.step(items, created)


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
