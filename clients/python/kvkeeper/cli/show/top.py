"""`kvkeeper top`: a live screen of the cache service; one frame an interval where the output is no terminal.

After the first frame, a service that does not answer is waited for. q ends the command with 0, Ctrl-C as any command.
"""

import argparse
import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.live import Live

from kvkeeper.cli.console.addresses import add_cache_flag
from kvkeeper.cli.console.problems import EXIT_DOWN, EXIT_OK
from kvkeeper.cli.show.top_view import History, Sample, frame
from kvkeeper.client import CacheClient, CallOptions, KvkeeperError

_OPTIONS = CallOptions(timeout_s=2.0, retry_s=0.0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between frames, 0.1 to 3600 (default: 1)"
    )
    parser.add_argument("--frames", type=_count, default=0, metavar="N", help="end after so many frames")
    add_cache_flag(parser)


def run(args: argparse.Namespace) -> int:
    console = Console()
    history, trouble = History(), ""
    with CacheClient(args.cache, _OPTIONS) as client, _screen(console) as screen:
        num_frames = 0
        while True:
            started = time.monotonic()
            try:
                history.add(Sample(started, client.stats()))
                trouble = ""
            except KvkeeperError as error:
                if history.last is None:
                    raise  # a service that never answered is reported as by every other command
                trouble = _trouble(error)
            screen.show(frame(args.cache, history, trouble))
            num_frames += 1
            if num_frames == args.frames or screen.wait(started + args.interval - time.monotonic()):
                return EXIT_DOWN if trouble and num_frames == args.frames else EXIT_OK


class _Screen:
    """The whole terminal, or frames one below the other."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console = console
        self._live = live

    def show(self, picture: RenderableType) -> None:
        if self._live is not None:
            self._live.update(picture, refresh=True)
        else:
            self._console.print(picture)
            self._console.print()
            self._console.file.flush()

    def wait(self, seconds: float) -> bool:
        """Whether q was pressed before the time was over."""
        deadline = time.monotonic() + seconds
        if self._live is None or not sys.stdin.isatty():
            time.sleep(max(seconds, 0))
            return False
        while select.select([sys.stdin], [], [], max(deadline - time.monotonic(), 0))[0]:
            if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
                return True
        return False


@contextlib.contextmanager
def _screen(console: Console) -> Iterator[_Screen]:
    if not console.is_terminal:
        yield _Screen(console, None)
        return
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        yield _Screen(console, live)


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come one by one and unseen; Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _trouble(error: KvkeeperError) -> str:
    if error.service_down:
        return error.message
    return f"the cache service answers {error.reason or error.code.name}"


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0.1 <= value <= 3600):
        raise argparse.ArgumentTypeError("a number of seconds, 0.1 to 3600")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value < 2**31:
        raise argparse.ArgumentTypeError("a number of frames, 1 or more")
    return value
