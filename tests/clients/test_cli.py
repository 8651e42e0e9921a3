"""The command line against a real cache service and against none: what it prints, where, and its exit code."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.server import RunningServer
from kvkeeper.cli import main
from kvkeeper.cli.console.messages import as_json
from kvkeeper.cli.console.tables import facts, table
from kvkeeper.client import AsyncCacheClient, GenerateOptions, KvkeeperError, Retention
from kvkeeper.common.service import VERSION
from kvkeeper.common.service.sizes import size

NO_SERVICE = "127.0.0.1:1"


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    out: str
    err: str


async def kvkeeper(*argv: str, stdin: bytes = b"") -> Outcome:
    """The command as a user runs it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvkeeper.cli", *argv),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), 60)
    return Outcome(process.returncode or 0, out.decode(), err.decode())


@pytest.mark.parametrize(
    ("argv", "service"),
    [
        (["stats", "--cache", NO_SERVICE, "--engine", NO_SERVICE], "cache"),
        (["sequences", "--cache", NO_SERVICE], "cache"),
        (["sequences", "--cache", NO_SERVICE, "--json"], "cache"),
        (["requests", "--engine", NO_SERVICE], "engine"),
        (["generate", "hello", "--engine", NO_SERVICE], "engine"),
        (["explain", "hello", "--engine", NO_SERVICE, "--cache", NO_SERVICE], "engine"),
        (["hint", "demote", "hello", "--engine", NO_SERVICE, "--cache", NO_SERVICE], "engine"),
        (["generate", "hello", "--engine", NO_SERVICE, "--json"], "engine"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
async def test_a_service_that_is_down_is_one_line_that_says_what_to_start(argv: list[str], service: str) -> None:
    outcome = await kvkeeper(*argv)
    assert outcome.exit_code == 3
    line = outcome.err.splitlines()[0]
    if "--json" in argv:
        told = json.loads(line)["error"]
        assert (told["reason"], told["metadata"]) == ("SERVICE_DOWN", {})
        line = f"kvkeeper: {told['message']}"
    assert line == (
        f"kvkeeper: the {service} service does not answer at {NO_SERVICE};"
        f" start it with `kvkeeper {service}`, or both services with `kvkeeper up`"
    )
    assert len(outcome.err.splitlines()) == (2 if argv[0] == "stats" else 1)
    assert outcome.out == ""


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["generate"],
        ["generate", "one", "--prompt-file", "two"],
        ["generate", "x", "--n", "many"],
        ["sequences", "--nonsense"],
        ["status", "--js"],
        ["up", "--max-sequences", "3"],
        ["up", "--cache-listen", "127.0.0.1:0"],
        ["up", "stray"],
    ],
    ids=" ".join,
)
async def test_wrong_usage_is_told_and_starts_nothing(argv: list[str]) -> None:
    outcome = await kvkeeper(*argv)
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert "usage: kvkeeper" in outcome.err
    assert "error: " in outcome.err


async def test_help_names_every_command_and_the_exit_codes() -> None:
    outcome = await kvkeeper("--help")
    assert outcome.exit_code == 0
    for word in (
        "cache",
        "engine",
        "up",
        "generate",
        "hint",
        "explain",
        "status",
        "stats",
        "top",
        "requests",
        "sequences",
        "Exit codes",
    ):
        assert word in outcome.out


async def test_a_service_told_its_own_help_shows_its_own_flags() -> None:
    outcome = await kvkeeper("cache", "--help")
    assert outcome.exit_code == 0
    assert "--pool-memory" in outcome.out


async def test_a_prompt_file_that_cannot_be_read_is_wrong_usage(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, text in (("missing", "cannot be read: No such file"), ("binary", "is not UTF-8")):
        outcome = await kvkeeper("generate", "--prompt-file", str(tmp_path / name), "--engine", NO_SERVICE)
        assert (outcome.exit_code, outcome.out) == (2, "")
        assert text in outcome.err


@pytest.mark.parametrize("number", ["99999999999999999999", "-99999999999999999999", "1.5", "x"])
@pytest.mark.parametrize("flag", ["--n", "--beams", "--max-tokens", "--top-k", "--seed", "--priority", "--timeout-ms"])
def test_a_number_that_no_message_holds_is_wrong_usage(flag: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "hello", "--engine", NO_SERVICE, f"{flag}={number}"])
    assert f"argument {flag}: " in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--length-penalty", "2"), ("--early-stopping",)])
async def test_what_belongs_to_a_beam_search_is_wrong_usage_without_one(flags: tuple[str, ...]) -> None:
    outcome = await kvkeeper("generate", "hello", *flags, "--engine", NO_SERVICE)
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert "go with --beams" in outcome.err


@pytest.mark.parametrize("flag", ["--temperature", "--top-p", "--top-k", "--min-p", "--seed"])
async def test_what_shapes_draws_is_wrong_usage_with_a_beam_search(flag: str) -> None:
    outcome = await kvkeeper("generate", "hello", "--beams", "4", flag, "1", "--engine", NO_SERVICE)
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert f"--beams searches, and draws no tokens: leave out {flag}" in outcome.err


async def test_text_that_is_not_utf8_is_wrong_usage() -> None:
    broken = os.fsdecode(b"abc \xff\xfe def")
    for argv, said in (
        (("generate", broken), "argument prompt: not UTF-8 text"),
        (("generate", "hello", "--stop", broken), "argument --stop: not UTF-8 text"),
        (("generate", "hello", "--tenant", broken), "argument --tenant: not UTF-8 text"),
    ):
        outcome = await kvkeeper(*argv, "--engine", NO_SERVICE)
        assert outcome.exit_code == 2
        assert outcome.err.endswith(said + "\n")
    outcome = await kvkeeper("generate", "-", "--engine", NO_SERVICE, stdin=b"abc \xff\xfe def")
    assert (outcome.exit_code, outcome.err) == (2, "kvkeeper: stdin is not UTF-8 text\n")
    outcome = await kvkeeper("generate", "-", "--engine", NO_SERVICE, stdin="naïve".encode())
    assert outcome.exit_code == 3  # it was read, and got as far as asking the engine


def test_metadata_is_written_as_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    for pair in ("novalue", "=x"):
        with pytest.raises(SystemExit, match="2"):
            main(["generate", "hello", "--engine", NO_SERVICE, "--metadata", pair])
        assert f"argument --metadata: KEY=VALUE, not '{pair}'" in capsys.readouterr().err


def test_what_a_request_is_marked_with_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def note(_: object, prompt: str, options: GenerateOptions) -> None:
        asked.append(options)
        raise KvkeeperError(grpc.StatusCode.INTERNAL)

    monkeypatch.setattr("kvkeeper.cli.generation.generate.EngineClient.generate", note)
    marks = ["--session-id", "talk", "--metadata", "a=b=c", "--metadata", "d=", "--reuse-hint", "soon", "--retain-ms", "9"]
    assert main(["generate", "x", *marks, "--cache-salt", "s"]) == 1
    assert (asked[0].session_id, asked[0].metadata) == ("talk", {"a": "b=c", "d": ""})
    assert (asked[0].reuse_hint, asked[0].retain_ms, asked[0].cache_salt) == ("soon", 9, "s")


def test_sink_and_window_are_asked_for_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def note(_: object, prompt: str, options: GenerateOptions) -> None:
        asked.append(options.retention)
        raise KvkeeperError(grpc.StatusCode.INTERNAL)

    monkeypatch.setattr("kvkeeper.cli.generation.generate.EngineClient.generate", note)
    for flags in ([], ["--window", "100"], ["--window", "100", "--sink", "0"]):
        assert main(["generate", "x", *flags]) == 1
    assert asked == [None, Retention(4, 100), Retention(0, 100)]
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "x", "--sink", "4"])
    assert "--sink goes with --window" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_one_line() -> None:
    command = (sys.executable, "-m", "kvkeeper.cli", "status", "--json", "--cache", NO_SERVICE, "--engine", NO_SERVICE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert json.loads(done.stderr.splitlines()[-1])["error"] == {
        "reason": "OUTPUT",
        "message": "the output cannot be written: No space left on device",
        "metadata": {},
    }


def test_an_engine_that_does_not_answer_in_time_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stuck(*_: Any) -> None:
        raise KvkeeperError(grpc.StatusCode.DEADLINE_EXCEEDED, message="Deadline Exceeded")

    monkeypatch.setattr("kvkeeper.cli.generation.generate.EngineClient", stuck)
    assert main(["generate", "hello", "--engine", NO_SERVICE]) == 3
    assert capsys.readouterr().err == f"kvkeeper: the engine service at {NO_SERVICE} takes too long to answer; is it stuck?\n"


async def test_status_shows_which_services_are_up_and_which_are_not(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    addresses = ("--cache", cache_server.address, "--engine", NO_SERVICE)
    async with AsyncCacheClient(cache_server.address) as client, await client.open_session(spec):
        outcome = await kvkeeper("status", *addresses)
        assert outcome.exit_code == 3
        cache_row, engine_row = (line.split() for line in outcome.out.splitlines()[2:4])
        assert cache_row[:3] == ["cache", "up", cache_server.address]
        assert engine_row[:3] == ["engine", "down", NO_SERVICE]
        assert "for tiny" in outcome.out
        assert "start it with `kvkeeper engine`" in outcome.err

        outcome = await kvkeeper("status", *addresses, "--json")
        assert outcome.exit_code == 3
        report = json.loads(outcome.out)
        assert (report["cache"]["state"], report["engine"]["state"]) == ("up", "down")
        assert report["cache"]["version"] == (await client.capabilities()).version == VERSION


async def test_stats_and_sequences_show_what_the_service_holds(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    flag = ("--cache", cache_server.address)
    assert (await kvkeeper("sequences", *flag)).out == "no live sequences\n"
    async with AsyncCacheClient(cache_server.address) as client, await client.open_session(spec) as session:
        await session.create_sequence(17, [1, 2, 3])
        await session.extend(17, 3)
        outcome = await kvkeeper("sequences", *flag)
        assert outcome.exit_code == 0
        row = outcome.out.splitlines()[2].split()
        assert row[:8] == [session.session_id[:8], "17", "running", "3", "0", "3", "0", "-"]
        (sequence,) = json.loads((await kvkeeper("sequences", *flag, "--json")).out)["sequences"]
        assert (sequence["sequence_id"], sequence["session_id"]) == (17, session.session_id)
        await session.update(17, retention=pb.Retention(num_sink_tokens=4, num_window_tokens=32))
        assert (await kvkeeper("sequences", *flag)).out.splitlines()[2].split()[7] == "4+32"
        refused = await kvkeeper("sequences", *flag, "--session", "0" * 32)
        assert (refused.exit_code, refused.out) == (1, "")
        assert "UNKNOWN_SESSION" in refused.err

        outcome = await kvkeeper("stats", *flag, "--engine", NO_SERVICE)
        assert outcome.exit_code == 3  # for the engine; the cache service's counts are shown nevertheless
        assert "waiting, running, loading, swapped  0, 1, 0, 0" in outcome.out
        report = json.loads((await kvkeeper("stats", *flag, "--engine", NO_SERVICE, "--json")).out)
        assert report["cache"]["pools"][0]["num_running_sequences"] == 1
        assert report["cache"]["epoch"] < session.epoch


def test_interruption_while_commands_are_imported_ends_in_the_same_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "kvkeeper.cli.commands":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvkeeper.cli.commands", raising=False)
    monkeypatch.delattr("kvkeeper.cli.commands", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["status"]) == 130


def test_interruption_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvkeeper.cli.show.sequences.CacheClient", interrupted)
    assert main(["sequences"]) == 130


def test_tables_line_up() -> None:
    assert table(("name", "n"), [("a", 5), ("long", 1234)]).splitlines() == [
        "name      n",
        "----  -----",
        "a         5",
        "long  1,234",
    ]
    assert table(("name",), []) == "name\n----"
    assert facts([("a", 1), ("bcd", "x")], "  ") == "  a    1\n  bcd  x"
    assert [size(number) for number in (0, 1023, 1 << 20, 3 << 29)] == ["0 B", "1023 B", "1 MiB", "1.5 GiB"]


def test_json_of_a_message_has_every_field_and_numbers() -> None:
    message = pb.GetStatsResponse(epoch=1 << 50, pools=[pb.PoolStats(pressure=pb.PRESSURE_LEVEL_LOW)])
    report = as_json(message)
    assert (report["epoch"], report["sessions"]) == (1 << 50, [])
    assert report["pools"][0]["pressure"] == "PRESSURE_LEVEL_LOW"
    assert report["pools"][0]["num_free_blocks"] == 0
