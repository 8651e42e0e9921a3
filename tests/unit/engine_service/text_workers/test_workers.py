"""Worker processes: what takes too much ends alone, everything else is served, and nothing of the engine is loaded there."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cache

import numpy as np
import pytest
import structlog

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.outputs.conversation import Chat
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from kvkeeper.engine_service.text_workers.text_worker import TOKEN_DTYPE, Kind, Limits, SetUp
from kvkeeper.engine_service.text_workers.workers import JobRefused, JobTooMuch, Workers
from kvkeeper.engine_service.values.errors import BrokenInvariant, Draining, HostExhausted

LONG = "def main():\n    return 'a text that is long'\n" * 20_000
BOMB = "((a{100}){100}){100}"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL_DIR)


@asynccontextmanager
async def workers(num_workers: int = 1, cpu_s: float = 20.0, memory: int = 512 << 20) -> AsyncIterator[Workers]:
    made = Workers(num_workers, SetUp(tokenizer().state(), tokenizer().vocab_size, asdict(Limits(cpu_s, memory))), 8)
    try:
        yield made
    finally:
        await made.close()


async def encode(made: Workers, text: str, client: str = "a") -> list[int]:
    return np.frombuffer(await made.run(client, Kind.ENCODE, text.encode()), TOKEN_DTYPE).tolist()


def constraint(kind: str, source: str | list[str], max_bytes: int = 64 << 10) -> bytes:
    return json.dumps([kind, source, max_bytes]).encode()


def pids(made: Workers) -> list[int]:
    return [process.pid for process in made._idle]


async def test_a_worker_does_what_the_tokenizer_does_one_job_after_another() -> None:
    async with workers() as made:
        text = "naïve café — 日本語 🙂\n" * 9
        assert await encode(made, text) == tokenizer().encode(text)
        first = pids(made)
        ids = np.array(tokenizer().encode(text), TOKEN_DTYPE).tobytes()
        assert (await made.run("b", Kind.DECODE, ids)).decode() == tokenizer().decode(
            tokenizer().encode(text), skip_special_tokens=False
        )
        chat = Chat([{"role": "user", "content": "x"}])
        rendered = await made.run("b", Kind.ENCODE_CHAT, json.dumps(asdict(chat)).encode())
        assert np.frombuffer(rendered, TOKEN_DTYPE).tolist() == tokenizer().encode_chat(chat)
        assert await made.run("b", Kind.CONSTRAINT, constraint("regex", "[a-z]+"))
        with pytest.raises(JobRefused, match="unclosed group"):
            await made.run("b", Kind.CONSTRAINT, constraint("regex", "(a"))
        assert pids(made) == first


async def test_a_model_without_a_chat_template_refuses_chats_alone() -> None:
    state = tokenizer().state()
    state["settings"] = {name: value for name, value in state["settings"].items() if name != "chat_template"}
    made = Workers(1, SetUp(state, tokenizer().vocab_size, asdict(Limits(20.0, 512 << 20))), 8)
    try:
        with pytest.raises(JobRefused, match="template"):
            await made.run("b", Kind.ENCODE_CHAT, b'{"messages": [{"role": "user", "content": "x"}]}')
        assert await encode(made, "x") == tokenizer().encode("x")
    finally:
        await made.close()


async def test_a_hostile_grammar_is_refused_and_the_next_job_is_done() -> None:
    deep = '{"type": "object", "properties": {"a": ' * 200 + "{}" + "}}" * 200
    table: list[tuple[str, str, type[JobRefused | JobTooMuch], str]] = [
        ("regex", BOMB, JobTooMuch, "states"),
        ("regex", "b" + BOMB, JobTooMuch, "states"),
        ("regex", "a{1000000}", JobTooMuch, "states"),
        ("json_schema", json.dumps({"type": "string", "pattern": f"^{BOMB}$"}), JobTooMuch, "states"),
        ("json_schema", '{"type": "array", "minItems": 100000000, "items": {"type": "null"}}', JobTooMuch, "states"),
        ("json_schema", "[" * 60_000, JobTooMuch, "deep"),
        ("json_schema", deep, JobTooMuch, "recursion limit"),
        ("regex", "(" * 20_000 + "a" + ")" * 20_000, JobRefused, "nested"),
        ("regex", r"[^\x{0}-\x{10FFFF}]", JobRefused, "no text"),
        ("json_schema", '{"$ref": "#"}', JobRefused, "no text"),
    ]
    async with workers() as made:
        for kind, source, error, reason in table:
            with pytest.raises(error, match=reason) as refused:
                await made.run("a", Kind.CONSTRAINT, constraint(kind, source))
            named = {"states": "states", "deep": "depth", "recursion limit": "depth"}.get(reason)
            assert refused.value.metadata == ({} if named is None else {"exceeded": named})
        assert await made.run("a", Kind.CONSTRAINT, constraint("regex", "[a-z]+"))


async def test_choices_are_bounded_as_the_pattern_that_they_become() -> None:
    async with workers() as made:
        with pytest.raises(JobRefused, match="at most 40 bytes") as refused:
            await made.run("a", Kind.CONSTRAINT, constraint("choices", ["-" * 9], 40))
        assert refused.value.metadata == {"limit": "40"}
        assert await made.run("a", Kind.CONSTRAINT, constraint("choices", ["-" * 6], 40))


@pytest.mark.parametrize(
    ("limits", "reason"), [({"cpu_s": 0.3}, "time"), ({"memory": 4 << 20}, "memory")], ids=["time", "memory"]
)
async def test_a_text_that_takes_too_much_ends_alone(limits: dict[str, float], reason: str) -> None:
    async with workers(2, **limits) as made:  # type: ignore[arg-type]
        hostile = asyncio.create_task(encode(made, LONG))
        assert await encode(made, "short", "b") == tokenizer().encode("short")
        with pytest.raises(JobTooMuch, match=f"too much {reason}") as refused:
            await hostile
        assert refused.value.metadata == {"exceeded": reason}
        assert await encode(made, "short") == tokenizer().encode("short"), "another worker takes its place"


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _wait_for_end(pid: int) -> None:
    """Leaves the exit code where it is."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_a_worker_that_others_killed_is_no_fault_of_its_job() -> None:
    async with workers() as made:
        await encode(made, "x")
        killed = pids(made)
        _kill(killed[0])
        assert await encode(made, "short") == tokenizer().encode("short")
        assert pids(made) != killed


async def test_the_exit_code_of_a_worker_is_left_to_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio's watcher of child processes is held up until the exit code is asked for: a poll before that would take it."""
    is_asked, take, wait = threading.Event(), os.waitpid, asyncio.subprocess.Process.wait

    def late(pid: int, options: int) -> tuple[int, int]:
        _wait_for_end(pid)
        if threading.current_thread() is not threading.main_thread():
            is_asked.wait()
        return take(pid, options)

    async def ask(process: asyncio.subprocess.Process) -> int:
        is_asked.set()
        return await wait(process)

    monkeypatch.setattr(os, "waitpid", late)
    monkeypatch.setattr(asyncio.subprocess.Process, "wait", ask)
    async with workers() as made:
        await encode(made, "x")
        (killed,) = pids(made)
        _kill(killed)
        _wait_for_end(killed)
        assert await encode(made, "short") == tokenizer().encode("short")


@pytest.mark.parametrize("how", [_kill, lambda pid: os.kill(pid, signal.SIGSEGV)], ids=["again and again", "by itself"])
async def test_a_job_that_ends_each_worker_is_refused(how: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeeper.engine_service.text_workers import workers as module

    exchange = module._exchange

    async def ends(process: asyncio.subprocess.Process, kind: Kind, body: bytes) -> object:
        if body == b"hostile":
            how(process.pid)
        return await exchange(process, kind, body)

    monkeypatch.setattr(module, "_exchange", ends)
    async with workers() as made:
        with pytest.raises(JobTooMuch):
            await encode(made, "hostile")
        assert await encode(made, "short") == tokenizer().encode("short")


def kill_in_set_up(monkeypatch: pytest.MonkeyPatch, num_killed: int, number: signal.Signals) -> list[int]:
    """The first workers end by this signal before they are set up. Returns those that did, as they come."""
    from kvkeeper.engine_service.text_workers import workers as module

    exchange, killed = module._exchange, list[int]()

    async def ends(process: asyncio.subprocess.Process, kind: Kind, body: bytes) -> object:
        if kind is Kind.SET_UP and len(killed) < num_killed:
            os.kill(process.pid, number)
            killed.append(process.pid)
        return await exchange(process, kind, body)

    monkeypatch.setattr(module, "_exchange", ends)
    return killed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_worker_that_is_killed_before_it_is_set_up_is_followed_by_another(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = kill_in_set_up(monkeypatch, 1, number)
    async with workers() as made:
        assert await encode(made, "short") == tokenizer().encode("short")
        assert len(killed) == 1 and pids(made) != killed


async def test_workers_that_are_all_killed_before_they_are_set_up_are_a_shortage_that_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = kill_in_set_up(monkeypatch, 2, signal.SIGKILL)
    async with workers() as made:
        with structlog.testing.capture_logs() as logs, pytest.raises(HostExhausted) as refused:
            await encode(made, "short")
        assert (refused.value.metadata, len(killed)) == ({"resource": "memory"}, 2)
        told = [(line["event"], line["code"], line["kind"]) for line in logs]
        assert told == [("text_worker_ended", -signal.SIGKILL, "set_up")] * 2
        assert pids(made) == []
        assert await encode(made, "short") == tokenizer().encode("short")


async def test_workers_that_cannot_be_set_up_by_themselves_are_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    async with workers() as made:
        with pytest.raises(BrokenInvariant):
            await encode(made, "short")


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "processes"),
        (OSError(errno.EMFILE, "Too many open files"), "descriptors"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (RuntimeError("can't start new thread"), "threads"),
    ],
)
async def test_a_worker_that_the_host_does_not_start_is_a_shortage_that_passes(
    error: Exception, resource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise error

    async with workers() as made:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", refuse)
            with pytest.raises(HostExhausted) as refused:
                await encode(made, "short")
        assert refused.value.metadata == {"resource": resource}
        assert await encode(made, "short") == tokenizer().encode("short")


async def test_at_the_end_no_process_is_left_and_waiting_calls_are_told() -> None:
    async with workers() as made:
        await encode(made, "x")
        (pid,) = pids(made)
        jobs = [asyncio.create_task(encode(made, LONG)) for _ in range(3)]
        await asyncio.sleep(0)
    for job in jobs:
        with pytest.raises(Draining):
            await job
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(Draining):
        await encode(made, "x")


def test_a_worker_loads_neither_torch_nor_grpc() -> None:
    program = "import sys, kvkeeper.engine_service.text_workers.text_worker\n"
    program += "print({'torch', 'grpc', 'asyncio'} & set(sys.modules) or 'none')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"
