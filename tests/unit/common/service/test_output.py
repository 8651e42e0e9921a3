"""What is written where it cannot be, or is not read: writing goes on, lines are counted, and the number is told later."""

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
import structlog

from kvkeeper.common.service import log, output
from kvkeeper.common.service.output import QueuedStream, num_dropped_lines, queued
from tests.support.processes.broken_outputs import BROKEN, unread

LINE = "x" * 200 + "\n"
MANY = 4 * output._MAX_WAITING_BYTES // len(LINE)  # more than may wait
DRAIN_S = 60.0


@pytest.fixture
def opened() -> Iterator[Callable[[int], QueuedStream]]:
    """A queued stream on a descriptor, which is closed after the test."""
    made: list[tuple[TextIO, QueuedStream]] = []

    def make(descriptor: int) -> QueuedStream:
        file = os.fdopen(descriptor, "w", encoding="utf-8")
        made.append((file, QueuedStream(file)))
        return made[-1][1]

    yield make
    for file, stream in made:
        settle(stream)
        file.close()


def settle(stream: QueuedStream) -> None:
    """It owes nothing any more, so that it does not write to whatever gets the number of its descriptor next."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
    assert stream.drain(DRAIN_S)


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_written_is_dropped_and_counted(
    broken: Callable[[], int], opened: Callable[[int], QueuedStream]
) -> None:
    stream = opened(broken())
    for _ in range(100):
        print("a line", file=stream, flush=True)
    assert stream.drain(DRAIN_S)
    assert stream.num_dropped == 100


def test_what_nobody_reads_is_dropped_once_much_waits_and_told_in_its_place(opened: Callable[[int], QueuedStream]) -> None:
    reading, writing = unread()
    stream = opened(writing)
    for number in range(MANY):
        stream.write(f"{number} {LINE}")  # returns, though nothing is read
    assert 0 < stream.num_dropped < MANY
    with os.fdopen(reading, "r") as reader:
        next(reader)  # that filled the pipe
        for number in range(MANY - stream.num_dropped):
            assert reader.readline() == f"{number} {LINE}", "in order, none torn"
        assert reader.readline() == stream.dropped_line(stream.num_dropped)
        stream.write("there is room again\n")
        assert reader.readline() == "there is room again\n"
        assert stream.drain(DRAIN_S)


def test_no_more_waits_than_may(opened: Callable[[int], QueuedStream]) -> None:
    reading, writing = unread()
    stream = opened(writing)
    for _ in range(MANY):
        stream.write(LINE)
    held = (MANY - stream.num_dropped) * len(LINE)
    assert output._MAX_WAITING_BYTES <= held < output._MAX_WAITING_BYTES + len(LINE)
    os.close(reading)
    assert stream.drain(DRAIN_S)


def test_a_reader_that_comes_back_is_told_how_much_it_missed(
    tmp_path: Path, opened: Callable[[int], QueuedStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing more is written."""
    monkeypatch.setattr(output, "_AGAIN_S", 0.01)
    os.mkfifo(path := tmp_path / "log")
    first = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    stream = opened(os.open(path, os.O_WRONLY))
    stream.write("before\n")
    assert stream.drain(DRAIN_S)
    assert os.read(first, 100) == b"before\n"
    os.close(first)
    stream.write("one\ntwo\n")
    assert stream.drain(DRAIN_S)
    with path.open() as reader:
        assert reader.readline() == stream.dropped_line(2)


def test_a_line_that_was_cut_does_not_run_into_the_next(
    opened: Callable[[int], QueuedStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in the middle of a line, and has room later."""
    reading, writing = os.pipe()
    stream = opened(writing)
    room, real_write = [3], os.write

    def write(descriptor: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = real_write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(output.os, "write", write)
    stream.write("cut here\nnot at all\n")
    stream.write("not at all\n")
    assert stream.drain(DRAIN_S)
    room[0] = 1000
    stream.write("whole\n")
    assert stream.drain(DRAIN_S)
    assert os.read(reading, 1000).decode() == f"cut\n{stream.dropped_line(3)}whole\n"
    os.close(reading)


def test_a_descriptor_that_does_not_block_loses_nothing(opened: Callable[[int], QueuedStream]) -> None:
    """As another process makes it that has the same terminal."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    stream = opened(writing)
    few = 2000
    for number in range(few):
        stream.write(f"{number} {LINE}")
    with os.fdopen(reading, "r") as reader:
        assert [reader.readline() for _ in range(few)] == [f"{number} {LINE}" for number in range(few)]
    assert stream.num_dropped == 0


def test_lines_of_threads_stay_whole(opened: Callable[[int], QueuedStream]) -> None:
    reading, writing = os.pipe()
    stream = opened(writing)

    def speak(word: str) -> None:
        for _ in range(200):
            print(word, word, sep="-", file=stream)

    threads = [threading.Thread(target=speak, args=(word * 20,)) for word in "abcd"]
    for thread in threads:
        thread.start()
    with os.fdopen(reading, "r") as reader:
        lines = {reader.readline() for _ in range(800)}
    for thread in threads:
        thread.join()
    assert lines == {f"{word * 20}-{word * 20}\n" for word in "abcd"}


def test_writing_may_interrupt_writing(opened: Callable[[int], QueuedStream]) -> None:
    """As a finalizer does that the collector of garbage runs at any line."""
    reading, writing = os.pipe()
    stream, depth = opened(writing), [0]

    def interrupt(frame: object, event: str, argument: object) -> object:
        if depth[0] == 0:
            depth[0] = 1
            stream.write("within\n")
            depth[0] = 0
        return interrupt

    sys.settrace(interrupt)
    stream.write("around\n")
    sys.settrace(None)
    assert stream.drain(DRAIN_S)
    lines = os.read(reading, 10_000).decode().splitlines()
    os.close(reading)
    assert lines.count("around") == 1
    assert lines.count("within") > 5


def test_both_streams_are_as_before_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with queued():
            print("an answer")
            print("no end yet ", end="", file=sys.stderr)
            assert num_dropped_lines() == 0
        assert (sys.stdout, sys.stderr) == (out, err)
        assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("an answer\n", "no end yet ")


def test_one_that_is_held_up_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """So that the interpreter's last words end, too."""
    monkeypatch.setattr(output, "_LAST_WORDS_S", 0.0)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as held_up:
        monkeypatch.setattr(sys, "stderr", held_up)
        with queued():
            for _ in range(MANY):
                sys.stderr.write(LINE)
            assert num_dropped_lines() > 0
            assert not isinstance(sys.stdout, QueuedStream), "it has no descriptor"
        ours = sys.stderr
        assert isinstance(ours, QueuedStream)
        os.close(reading)
        settle(ours)


def test_a_stream_that_was_closed_before_the_start_takes_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with queued():
        print("for no one", file=sys.stderr)
        sys.stderr.write("for no one\n")


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("it has no words")


@pytest.fixture
def log_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("log_as_it_was")
def test_the_log_tells_what_was_dropped_in_a_line_of_its_own_form(
    opened: Callable[[int], QueuedStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    stream, real_write = opened(writing), os.write
    log.configure("info", "engine", stream)  # type: ignore[arg-type]

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.os, "write", fail)
    for _ in range(3):
        structlog.get_logger().info("lost")
    assert stream.drain(DRAIN_S)
    monkeypatch.setattr(output.os, "write", real_write)
    structlog.get_logger().info("told")
    assert stream.drain(DRAIN_S)
    dropped, told = map(json.loads, os.read(reading, 10_000).splitlines())
    os.close(reading)
    assert (dropped["event"], dropped["level"], dropped["num_lines"]) == ("log_lines_dropped", "warning", 3)
    assert (dropped["service"], dropped["pid"], told["event"]) == ("engine", os.getpid(), "told")


@pytest.mark.usefixtures("log_as_it_was")
def test_a_field_that_has_no_words_costs_the_fields_of_its_line() -> None:
    stream = io.StringIO()
    log.configure("info", "cache", stream)
    structlog.get_logger().info("session_opened", odd=Unprintable())
    told = json.loads(stream.getvalue())
    assert (told["event"], told["is_told_in_part"], told["service"]) == ("session_opened", True, "cache")


@pytest.mark.usefixtures("log_as_it_was")
def test_what_another_process_says_is_passed_on_as_it_comes() -> None:
    stream = io.StringIO()
    log.configure("info", "engine", stream)
    with log.passing_on("front") as descriptor:
        os.write(
            descriptor, b'{"service": "front", "pid": 7, "level": "warning", "event": "odd", "timestamp": "then"}\na library\n'
        )
        (passing,) = [thread for thread in threading.enumerate() if thread.name == "front"]
    passing.join()
    odd, said = map(json.loads, stream.getvalue().splitlines())
    assert (odd["event"], odd["level"], odd["service"], odd["pid"]) == ("odd", "warning", "front", 7)
    assert odd["timestamp"] != "then"
    assert (said["event"], said["line"], said["service"]) == ("front_said", "a library", "engine")
