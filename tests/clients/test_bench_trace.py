"""`kvkeeper bench trace`: the same hits in the core and over gRPC, one line for each error, nothing left behind."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.server import RunningServer
from kvkeeper.cli import main
from kvkeeper.cli.benchmark import plot, traces
from kvkeeper.cli.console.problems import UsageFailure
from kvkeeper.client import AsyncCacheClient
from kvkeeper.common.service.extras import install_command
from tests.support.processes.signals import hear_interrupts

# Blocks 7 and 8 return once each while they are cached; of the last request only the first block is where it was.
REQUESTS = [[7, 8, 9], [7, 8, 100], [5], [7, 1]]
NUM_HITS = 3


def write(path: Path, requests: list[list[int]]) -> str:
    lines = [{"timestamp": 1, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids} for ids in requests]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["bench", "trace", *argv]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1
    result: dict[str, Any] = json.loads(said.out)
    return result


def test_the_core_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, write(tmp_path / "t", REQUESTS), "--policy", "lru", "--blocks", "20")
    assert (found["requests"], found["blocks_asked"], found["distinct_blocks"]) == (4, 9, 6)
    (row,) = found["results"]
    assert (row["policy"], row["blocks"], row["hits"], row["evictions"], row["steps"]) == ("lru", 20, NUM_HITS, 0, 12)
    assert row["hit_rate"] == row["optimum_hit_rate"] == round(NUM_HITS / 9, 4)
    assert 0 < row["step_p50_us"] <= row["step_p99_us"]


def test_policies_and_sizes_may_be_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t", [[1, 2], [3, 4], [1, 2]])
    found = report(capsys, trace, "--policy", "all", "--blocks", "2", "--blocks", "9")
    rows = {(row["policy"], row["blocks"]): (row["hits"], row["evictions"]) for row in found["results"]}
    assert rows.keys() == {(policy, size) for policy in POLICY_NAMES for size in (2, 9)}
    assert rows["lru", 9] == (2, 0)
    assert rows["lru", 2][0] == 0
    assert rows["lru", 2][1] > 0


async def test_a_running_service_hits_what_the_core_hits(cache_server: RunningServer, tmp_path: Path) -> None:
    running = await live(write(tmp_path / "t", REQUESTS), cache_server)
    out, err = await running.communicate()
    assert (running.returncode, err) == (0, b"")
    (row,) = json.loads(out)["results"]
    assert (row["hits"], row["evictions"], row["steps"]) == (NUM_HITS, 0, 12)
    assert (row["target"], row["policy"], row["blocks"]) == (cache_server.address, CacheConfig().eviction_policy, 255)
    async with AsyncCacheClient(cache_server.address) as client:
        await expect_nothing_left(client)


async def test_interrupted_it_leaves_nothing_in_the_service(cache_server: RunningServer, tmp_path: Path) -> None:
    endless = write(tmp_path / "t", [[number, number + 1] for number in range(0, 200_000, 2)])
    running = await live(endless, cache_server)
    async with AsyncCacheClient(cache_server.address) as client, asyncio.timeout(60):
        while not any(pool.num_starts > 20 for pool in (await client.stats()).pools):  # noqa: ASYNC110  another process
            await asyncio.sleep(0.02)
        running.send_signal(signal.SIGINT)
        out, err = await running.communicate()
        assert (running.returncode, out, err) == (130, b"", b"")
        await expect_nothing_left(client)


async def live(trace: str, server: RunningServer) -> asyncio.subprocess.Process:
    """The command in a process of its own."""
    hear_interrupts()
    command = (sys.executable, "-m", "kvkeeper.cli", "bench", "trace", trace, "--live", "--cache", server.address)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(*command, env=env, stdout=-1, stderr=-1)


async def expect_nothing_left(client: AsyncCacheClient) -> None:
    stats = await client.stats()
    (pool,) = stats.pools
    assert pool.num_starts > 0
    assert not stats.sessions
    assert (pool.num_cached_blocks, pool.num_referenced_blocks, pool.num_fenced_blocks) == (0, 0, 0)
    assert pool.num_free_blocks == pool.pool.num_blocks - 1


async def test_a_request_that_the_pool_cannot_hold_is_refused_at_once(cache_server: RunningServer, tmp_path: Path) -> None:
    running = await live(write(tmp_path / "t", [list(range(300))]), cache_server)
    out, err = await running.communicate()
    assert (running.returncode, out) == (2, b"")
    assert b"up to 254 blocks of 16 tokens, this trace has one of 300" in err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON: "),
        (b"[1]", "not an object with a list `hash_ids`"),
        (b'{"hash_ids": 3}', "not an object with a list `hash_ids`"),
        (b'{"hash_ids": [1, "2"]}', "`hash_ids` holds something that is no integer"),
        (b'{"hash_ids": [1, true]}', "`hash_ids` holds something that is no integer"),
        (b'{"hash_ids": [4, 4]}', "`hash_ids` names a block twice"),
        (b'{"hash_ids": [\xff]}', "not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else None,
)
def test_a_malformed_line_is_named(line: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"hash_ids": [1]}\n\n' + line + b"\n")
    assert main(["bench", "trace", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"kvkeeper: {path}, line 3: {reason}")
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["missing.jsonl"], "missing.jsonl cannot be read: No such file or directory"),
        (["--policy", "best"], "--policy: one of adaptive, "),
        (["--live", "--blocks", "3"], "a running service has its policy and size"),
        (["--blocks", "3"], "--blocks 3 do not hold the longest request of the trace, of "),
    ],
)
def test_wrong_usage_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "trace", *argv]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith(f"kvkeeper: {said}")


def test_an_empty_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "trace", write(tmp_path / "t", [[]])]) == 2
    assert capsys.readouterr().err == f"kvkeeper: {tmp_path / 't'} holds no requests\n"


def test_a_plot_is_a_picture_with_lru_and_the_optimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plot.png"
    trace = write(tmp_path / "t", [[1, 2], [3, 4], [1, 2]])
    found = report(capsys, trace, "--blocks", "9", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "t"]
    assert list(found["curves"]) == ["adaptive", "lru", "optimum"]
    assert all([blocks for blocks, _ in points] == [2, 3, 4] for points in found["curves"].values())
    assert found["curves"]["optimum"][-1] == found["curves"]["lru"][-1] == [4, round(2 / 6, 4)]


def test_a_plot_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t", REQUESTS)
    assert main(["bench", "trace", trace, "--blocks", "9", "--plot", str(tmp_path / "no" / "plot.png")]) == 2
    assert "plot.png cannot be written: No such file or directory" in capsys.readouterr().err


def test_without_matplotlib_the_command_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "trace", "--plot", "x.png"]) == 2
    assert capsys.readouterr().err == f"kvkeeper: --plot needs matplotlib: {install_command('plot')}\n"
    with pytest.raises(UsageFailure):
        plot.require()


def test_a_generated_trace_is_its_seed_and_mostly_never_seen_again() -> None:
    trace = traces.generate(3, 500)
    assert trace == traces.generate(3, 500) != traces.generate(4, 500)
    seen: dict[int, int] = {}
    for request in trace:
        assert len(set(request)) == len(request)
        for block in request:
            seen[block] = seen.get(block, 0) + 1
    assert sum(times == 1 for times in seen.values()) > len(seen) / 2
    assert max(seen.values()) > 50
