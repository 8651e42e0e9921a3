"""What an engine costs beside its model: a model that computes nothing, both services as processes, and real streams.

Tokens a second and processor time a token, of all processes and of the engine's loop alone, at 1 to 1,024 streams; with no
front, with one, and with two, on a TCP port then. With BASE= naming another checkout, which has a virtual environment of
its own, its services are measured in turn with these. STREAMS= and FRONTS= choose. Streams are on one call a client, as
the client of Python has them; with CALLS=own each is a call of its own, as gateways and other clients have them. What a request
costs that starts and ends is part of its tokens' cost; with TOKENS= streams are longer or shorter, which tells the two apart.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import ask
from tests.benchmarks.processes import process
from tests.support.processes.services import free_ports

_ENGINE = str(Path(__file__).with_name("null_engine.py"))
_PROMPT_TOKENS = 64
_NUM_TURNS = 3
_NUM_TOKENS = {1: 2000, 64: 400, 256: 150, 1024: 60}  # by number of streams
_USUAL_NUM_TOKENS = 400
_CALLS = os.environ.get("CALLS", "many")
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
    fronts = [int(word) for word in os.environ.get("FRONTS", "0 1 2").split()]
    streams = [int(word) for word in os.environ.get("STREAMS", "").split()] or list(_NUM_TOKENS)
    measured: list[tuple[dict[str, object], str, int | None]] = [({"fronts": each}, sys.executable, each) for each in fronts]
    if base := os.environ.get("BASE"):
        measured.append(({"checkout": "base"}, str(Path(base, ".venv/bin/python")), None))
    for num_streams in streams:
        num_tokens = int(os.environ.get("TOKENS", 0)) or _NUM_TOKENS.get(num_streams, _USUAL_NUM_TOKENS)
        turns: list[list[_Turn]] = [[] for _ in measured]
        for _ in range(_NUM_TURNS):
            for (_, python, num_fronts), found in zip(measured, turns, strict=True):
                found.append(asyncio.run(_measure(python, num_fronts, num_streams, num_tokens)))
        for (label, _, _), found in zip(measured, turns, strict=True):
            yield {
                "streams": num_streams,
                "tokens": num_tokens,
                "calls": _CALLS,
                **label,
                **_figure(found, num_streams * num_tokens),
            }


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


async def _measure(python: str, num_fronts: int | None, num_streams: int, num_tokens: int) -> _Turn:
    """num_fronts: None where the checkout knows no fronts."""
    with tempfile.TemporaryDirectory() as folder:
        cache, address = f"unix:{folder}/cache", f"unix:{folder}/engine"
        if num_fronts is not None and num_fronts > 1:
            (address,) = free_ports(1)
        num_blocks = num_streams * (_PROMPT_TOKENS + num_tokens + 16) // 16 + num_streams + 64
        cache_flags = ("--num-blocks", str(num_blocks), "--runtime-dir", folder, "--max-sequences", "2048")
        engine_flags = ("--listen", address, "--cache", cache, "--block-size", "16", "--token-budget", "4096")
        waiting_flags = ("--max-waiting", "4096")  # all of them come from one connection
        front_flags = () if num_fronts is None else ("--fronts", str(num_fronts))
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, *cache_flags, python=python) as cache_process,
            process("-P", _ENGINE, *engine_flags, *waiting_flags, *front_flags, python=python) as engine_process,
            AsyncExitStack() as stack,
        ):
            # A client is one connection, which one front has.
            clients = [await stack.enter_async_context(AsyncEngineClient(address)) for _ in range(num_fronts or 1)]
            for client in clients:
                await _stream(client, 0, 8)  # warms all up
                for many in client._many.values():
                    many._is_unknown = _CALLS == "own"  # as if the engine had no call of many
            client = clients[0]
            steps = (await client.stats()).num_steps
            pids = {"cache": cache_process.pid, "engine": engine_process.pid, "client": os.getpid()}
            pids |= {f"front{place}": pid for place, pid in enumerate(_fronts_of(engine_process.pid))}
            before, loop_s = _spent(pids), _thread_s(engine_process.pid)
            begin = time.perf_counter()
            streams = (_stream(clients[place % len(clients)], place + 1, num_tokens) for place in range(num_streams))
            firsts = await asyncio.gather(*streams)
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
    return (await ask(client, prompt, num_tokens)).first_token_seconds


def _fronts_of(pid: int) -> list[int]:
    """The front processes of an engine."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"front" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _spent(pids: Mapping[str, int]) -> dict[str, float]:
    """Processor seconds of each process, all its threads."""
    return {name: _seconds(Path(f"/proc/{pid}/stat")) for name, pid in pids.items()}


def _thread_s(pid: int) -> float:
    """Processor seconds of a process' main thread, in which its loop runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
