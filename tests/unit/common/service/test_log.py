"""Lines of a log: for people on a terminal, for programs elsewhere; who speaks in each; and no variables in a traceback."""

import io
import json
import os
import re
from collections.abc import Iterator

import pytest
import structlog

from kvkeeper.common.service import VERSION, log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def fail_with_a_secret() -> None:
    prompt = "the prompt"  # a variable of the frame that fails
    assert prompt
    raise ValueError("it failed")


def test_programs_get_json_with_service_process_and_version() -> None:
    stream = io.StringIO()
    log.configure("info", "engine", stream)
    structlog.get_logger().info("ready", address="127.0.0.1:1")
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert (told["service"], told["pid"], told["version"]) == ("engine", os.getpid(), VERSION)
    assert (told["event"], told["level"], told["address"]) == ("ready", "info", "127.0.0.1:1")


def test_people_get_a_readable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    log.configure("info", "cache", stream)
    structlog.get_logger().info("ready", address="127.0.0.1:1")
    (line,) = stream.getvalue().splitlines()
    said = rf"\d\d:\d\d:\d\d \[info *\] ready +service=cache pid={os.getpid()} version={VERSION} address=127.0.0.1:1"
    assert re.fullmatch(said, line)


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_traceback_shows_no_variables(stream: io.StringIO) -> None:
    log.configure("info", "engine", stream)
    try:
        fail_with_a_secret()
    except ValueError:
        structlog.get_logger().exception("broken_invariant")
    assert "it failed" in stream.getvalue()
    assert "'the prompt'" not in stream.getvalue()


def test_less_than_the_level_is_not_told() -> None:
    stream = io.StringIO()
    log.configure("warning", "cache", stream)
    structlog.get_logger().info("ready")
    assert stream.getvalue() == ""
