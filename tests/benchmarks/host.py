"""What an engine costs beside its model: a model that computes nothing, both services as processes, and real streams.

Tokens a second and processor time a token, of all processes and of the engine's loop alone, at 1 to 1,024 streams. With BASE=
naming another checkout, which has a virtual environment of its own, its services are measured in turn with these.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvkeeper.client import AsyncEngineClient, GenerateOptions, Sampling
from tests.benchmarks.processes import process

_ENGINE = str(Path(__file__).with_name("null_engine.py"))
_PROMPT_TOKENS = 64
_NUM_TURNS = 3
_NUM_TOKENS = {1: 2000, 64: 400, 256: 150, 1024: 60}  # by number of streams
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Turn:
    """One measurement, in seconds: of the clock, of processors by process, and of the engine's loop alone."""

    seconds: float
    processor_s: dict[str, float]
    loop_s: float
    first_tokens: list[float]
    num_steps: int


def figures() -> Iterator[dict[str, object]]:
    pythons = {"": sys.executable}
    if base := os.environ.get("BASE"):
        pythons["base"] = str(Path(base, ".venv/bin/python"))
    for num_streams, num_tokens in _NUM_TOKENS.items():
        turns: dict[str, list[_Turn]] = {name: [] for name in pythons}
        for _ in range(_NUM_TURNS):
            for name, python in pythons.items():
                turns[name].append(asyncio.run(_measure(python, num_streams, num_tokens)))
        for name, found in turns.items():
            yield {"streams": num_streams, **({"checkout": name} if name else {}), **_figure(found, num_streams * num_tokens)}


def _figure(turns: Sequence[_Turn], num_tokens: int) -> dict[str, object]:
    """Of the turn with the least processor time: the others had more of the machine's noise."""
    best = min(turns, key=lambda turn: sum(turn.processor_s.values()))
    each = {name: round(seconds / num_tokens * 1e6, 1) for name, seconds in best.processor_s.items()}
    return {
        "tokens_per_second": round(num_tokens / best.seconds),
        "processor_us_per_token": round(sum(each.values()), 1),
        **{f"{name}_us_per_token": value for name, value in each.items()},
        "loop_us_per_token": round(best.loop_s / num_tokens * 1e6, 1),
        "loop_ms_per_step": round(best.loop_s / best.num_steps * 1e3, 2),
        "first_token_p50_ms": round(float(np.median(best.first_tokens)) * 1e3, 1),
        "first_token_p99_ms": round(float(np.percentile(best.first_tokens, 99)) * 1e3, 1),
    }


async def _measure(python: str, num_streams: int, num_tokens: int) -> _Turn:
    with tempfile.TemporaryDirectory() as folder:
        cache, address = f"unix:{folder}/cache", f"unix:{folder}/engine"
        num_blocks = num_streams * (_PROMPT_TOKENS + num_tokens + 16) // 16 + num_streams + 64
        cache_flags = ("--num-blocks", str(num_blocks), "--runtime-dir", folder, "--max-sequences", "2048")
        engine_flags = ("--listen", address, "--cache", cache, "--block-size", "16", "--token-budget", "4096")
        waiting_flags = ("--max-waiting", "4096")  # all of them come from one connection
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, *cache_flags, python=python) as cache_process,
            process("-P", _ENGINE, *engine_flags, *waiting_flags, python=python) as engine_process,
            AsyncEngineClient(address) as client,
        ):
            await _stream(client, 0, 8)  # warms both up
            steps = (await client.stats()).num_steps
            pids = {"cache": cache_process.pid, "engine": engine_process.pid, "client": os.getpid()}
            before, loop_s = _spent(pids), _thread_s(engine_process.pid)
            begin = time.perf_counter()
            firsts = await asyncio.gather(*(_stream(client, place + 1, num_tokens) for place in range(num_streams)))
            seconds = time.perf_counter() - begin
            return _Turn(
                seconds,
                {name: spent - before[name] for name, spent in _spent(pids).items()},
                _thread_s(engine_process.pid) - loop_s,
                firsts,
                (await client.stats()).num_steps - steps,
            )


async def _stream(client: AsyncEngineClient, place: int, num_tokens: int) -> float:
    """Seconds to the first token."""
    prompt = np.full(_PROMPT_TOKENS, 8 + place % 400, np.int32)
    prompt[:2] = divmod(place, 400)
    options = GenerateOptions(sampling=Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    begin, first, count = time.perf_counter(), 0.0, 0
    async with client.generate(prompt, options) as chunks:
        async for chunk in chunks:
            first = first or time.perf_counter() - begin
            count += len(chunk.token_ids)
    assert count == num_tokens, "every token was asked for"
    return first


def _spent(pids: Mapping[str, int]) -> dict[str, float]:
    """Processor seconds of each process, all its threads."""
    return {name: _seconds(Path(f"/proc/{pid}/stat")) for name, pid in pids.items()}


def _thread_s(pid: int) -> float:
    """Processor seconds of a process' main thread, in which its loop runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
