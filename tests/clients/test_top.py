"""`kvkeeper top`: what a screen shows, and what the command does while a service comes and goes."""

import asyncio
import io
import os
import pty
import signal
import sys
from typing import Any

import pytest
from rich.console import Console

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.server import RunningServer, start_server
from kvkeeper.cli.show.top_view import Bar, History, Sample, frame, widths
from kvkeeper.client import AsyncCacheClient
from tests.support.processes.signals import hear_interrupts

NO_SERVICE = "127.0.0.1:1"
DEADLINE = 30


def answer(uptime: float, **sums: int) -> pb.GetStatsResponse:
    session = pb.SessionInfo(session_id="0123456789abcdef", client_name="engine-1", step_id=sums.get("num_steps", 0))
    info = pb.PoolInfo(num_blocks=101, block_size=16, spec=pb.KvSpec(model_id="tiny"))
    pool = pb.PoolStats(pool=info, pressure=pb.PRESSURE_LEVEL_HIGH, num_free_blocks=100, **sums)
    return pb.GetStatsResponse(uptime_seconds=uptime, pools=[pool], sessions=[session])


def shown(history: History, trouble: str = "") -> str:
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(frame("127.0.0.1:7410", history, trouble))
    return console.export_text()


def history_of(*samples: tuple[float, pb.GetStatsResponse]) -> History:
    history = History()
    for at, stats in samples:
        history.add(Sample(at, stats))
    return history


def test_a_screen_shows_pools_and_sessions_and_what_happens_a_second() -> None:
    text = shown(
        history_of(
            (0.0, answer(60, num_steps=10, num_look_up_tokens=1000, num_hit_tokens=1000, num_evicted_blocks=5)),
            (2.0, answer(3662, num_steps=210, num_look_up_tokens=1400, num_hit_tokens=1300, num_evicted_blocks=25)),
        )
    )
    for part in ("up 1:01:02", "for tiny", "high", "75.0% of 400 tokens", "01234567", "engine-1", "free 100"):
        assert part in text, part
    lines = [line.split() for line in text.splitlines()]
    assert any(line[-3:-1] == ["steps/s", "100"] for line in lines)
    assert any(line[-3:-1] == ["evictions/s", "10"] for line in lines)
    assert max(map(len, text.splitlines())) <= 80


def test_a_pool_with_groups_of_layers_tells_what_the_tables_of_each_have() -> None:
    stats, kinds = answer(60), (pb.LAYER_GROUP_KIND_FULL, pb.LAYER_GROUP_KIND_CHUNKED, pb.LAYER_GROUP_KIND_TAIL)
    assert "by group" not in shown(history_of((0.0, stats)))
    stats.pools[0].pool.spec.groups.extend(pb.LayerGroup(kind=kind) for kind in kinds)
    for window_tokens, num_held in ((0, 512), (64, 4), (256, 16)):
        stats.pools[0].groups.add(window_tokens=window_tokens, num_held_entries=num_held, num_passed_entries=512 - num_held)
    text = shown(history_of((0.0, stats)))
    for line in ("by group", "all tokens: 512, 0", "chunk of 64 tokens: 4, 508", "tail of 256 tokens: 16, 496"):
        assert line in text, text


def test_rates_are_of_the_last_interval_and_the_hit_rate_of_the_last_seconds() -> None:
    samples = [
        (float(at), answer(at, num_steps=at * at, num_look_up_tokens=100 * at, num_hit_tokens=10 * at)) for at in range(30)
    ]
    history = history_of(*samples)
    assert history.last is not None
    (pool,) = history.last.stats.pools
    assert history.rate(pool, "num_steps") == 29 * 29 - 28 * 28
    assert history.hit_rate(pool) == (0.1, 1000)
    assert history.step_rate(history.last.stats.sessions[0]) == 29 * 29 - 28 * 28


def test_a_service_that_started_anew_has_no_rates_from_before() -> None:
    history = history_of((0.0, answer(100, num_steps=1000)), (1.0, answer(1, num_steps=3)))
    assert history.last is not None
    assert history.rate(history.last.stats.pools[0], "num_steps") == 0
    history.add(Sample(2.0, answer(2, num_steps=10)))
    assert history.rate(history.last.stats.pools[0], "num_steps") == 7


def test_trouble_is_told_above_what_was_seen_last() -> None:
    assert shown(History(), "no answer").splitlines()[1].rstrip() == "no answer"
    text = shown(history_of((0.0, answer(1))), "no answer")
    assert text.index("no answer; below are the last counts received") < text.index("for tiny")


@pytest.mark.parametrize(
    ("counts", "width", "cells"),
    [
        ((1, 0, 999), 10, [1, 0, 9]),
        ((1, 1, 1), 10, [4, 3, 3]),
        ((0, 0, 0), 10, [0, 0, 0]),
        ((5, 5), 1, [0, 0]),
        ((50, 25, 25), 8, [4, 2, 2]),
    ],
)
def test_every_kind_of_block_there_is_has_a_cell_of_the_bar(counts: tuple[int, ...], width: int, cells: list[int]) -> None:
    assert widths(counts, width) == cells


def test_the_bar_fills_its_line_and_can_do_without_colour_and_unicode() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), "ascii"), record=True, width=20)
    console.print(Bar([10, 0, 0, 0, 5, 5]))
    assert console.export_text() == "#" * 10 + "+" * 5 + "." * 5 + "\n"


async def start(*argv: str, **streams: Any) -> asyncio.subprocess.Process:
    hear_interrupts()
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvkeeper.cli", "top", *argv),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100", "TERM": "xterm"},
        **{"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE, **streams},
    )


async def test_a_service_that_never_answered_is_one_line_and_exit_code_3() -> None:
    process = await start("--cache", NO_SERVICE)
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE)
    assert (process.returncode, out) == (3, b"")
    assert err.startswith(b"kvkeeper: the cache service does not answer at ")


@pytest.mark.parametrize("flag", ["--interval=0", "--interval=nan", "--interval=x", "--frames=0"])
async def test_wrong_numbers_are_wrong_usage(flag: str) -> None:
    process = await start(flag, "--cache", NO_SERVICE)
    _, err = await asyncio.wait_for(process.communicate(), DEADLINE)
    assert process.returncode == 2
    assert b"argument --" in err


async def test_frames_come_without_a_terminal_and_outlive_the_service(folder: Any, spec: pb.KvSpec) -> None:
    config = CacheConfig(listen=f"unix:{folder}/s", runtime_dir=folder / "run", pool_memory=1 << 20, drain_timeout=0)
    server: RunningServer = await start_server(config)
    process = await start("--cache", server.address, "--interval", "0.1")
    assert process.stdout is not None

    async def until(text: str) -> str:
        assert process.stdout is not None
        while text not in (line := (await asyncio.wait_for(process.stdout.readline(), DEADLINE)).decode()):
            assert line, "it ended"
        return line

    try:
        async with AsyncCacheClient(server.address) as client:
            await client.open_session(spec, client_name="watched")
            await until("for tiny")
            await until("watched")
        await server.stop()
        await until("the cache service does not answer at unix:")
        server = await start_server(config)
        await until("no pool yet")
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), DEADLINE)
        assert process.returncode == 130
    finally:
        if process.returncode is None:
            process.kill()
        await server.stop()


async def test_q_ends_the_screen_of_a_terminal(cache_server: RunningServer) -> None:
    ours, theirs = pty.openpty()
    process = await start("--cache", cache_server.address, "--interval", "60", stdin=theirs, stdout=theirs)
    os.close(theirs)
    seen = b""
    loop = asyncio.get_running_loop()
    while b"no pool yet" not in seen:
        seen += await asyncio.wait_for(loop.run_in_executor(None, os.read, ours, 4096), DEADLINE)
    os.write(ours, b"xq")
    rest = loop.run_in_executor(None, _read_all, ours)
    assert await asyncio.wait_for(process.wait(), DEADLINE) == 0
    assert b"\x1b[?1049l" in await rest  # the terminal has its own screen back
    os.close(ours)


def _read_all(descriptor: int) -> bytes:
    data = b""
    while True:
        try:
            chunk = os.read(descriptor, 4096)
        except OSError:  # the other end is closed
            return data
        data += chunk
