"""`kvkeeper up`: both services as processes of their own, kept running until a signal ends them.

The cache service starts first and ends last, so that an engine always finds it. A service that dies is started again while the
other stays: this is why there are two processes. However `up` itself ends, no process is left behind.
"""

import argparse
import asyncio
import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvkeeper.cli.console.addresses import add_json_flag, cache_address, engine_address
from kvkeeper.cli.console.problems import EXIT_FAILED, EXIT_USAGE, UsageFailure, complain
from kvkeeper.cli.console.tables import facts
from kvkeeper.cli.show.readiness import until_serving
from kvkeeper.cli.show.status import model_line, pool_line
from kvkeeper.cli.start.processes import ServiceProcess
from kvkeeper.cli.start.supervisor import GivenUp, Service, Supervisor
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, KvkeeperError, targets

_GRACE_S = 20.0  # a service has its own, shorter limit for draining; a second signal ends at once
# More than a block long, so that typing it again shows a prefix hit.
_FIRST_PROMPT = "def fibonacci(n):  # the first n Fibonacci numbers, smallest first"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_parser(commands: Any, text: str) -> None:
    parser = commands.add_parser(
        "up",
        help=text,
        description="Runs both services until Ctrl-C; one that dies is started again. Any flag of one service is written with"
        " its name in front: --cache-max-sequences 64 (see kvkeeper cache --help, kvkeeper engine --help).",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="PATH", help="Hugging Face folder (default: the embedded demo model)")
    parser.add_argument("--pool-memory", metavar="SIZE", help="memory of a pool, reserved at start, for example 1GiB")
    parser.add_argument("--host-memory", metavar="SIZE", help="host tier of a pool, for what the pool has no room for")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep what is cached when both services end, for the next start; it lies in a folder of --cache-memory-dir,"
        " by default one in /dev/shm",
    )
    parser.add_argument("--cache-listen", metavar="ADDRESS", default=cache_address(), help="(default: %(default)s)")
    parser.add_argument("--engine-listen", metavar="ADDRESS", default=engine_address(), help="(default: %(default)s)")
    parser.add_argument("--log-level", metavar="LEVEL", default="info", help="of both (default: %(default)s)")
    add_json_flag(parser)
    parser.set_defaults(run=run, takes_other_flags=True, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    from kvkeeper.cli.start.checks import StartError, check_start

    try:
        flags = _flags_of_services(args)
        for service, address in (("cache", args.cache_listen), ("engine", args.engine_listen)):
            if address.endswith(":0"):
                raise UsageFailure(f"--{service}-listen: a fixed port, so that others find it")
    except UsageFailure as error:
        args.usage_error(str(error))
    try:
        check_start(flags)
    except UsageFailure as error:
        complain(str(error), reason="USAGE", is_json=args.json)
        return EXIT_USAGE
    except StartError as error:
        complain(str(error), reason="NOT_STARTED", is_json=args.json)
        return EXIT_FAILED
    exit_code = asyncio.run(_Pair(args, flags).run())
    if exit_code > 128:
        _tell("stopped; both services have ended")
    return exit_code


class _Pair:
    """The two services under a supervisor, until a signal ends them."""

    def __init__(self, args: argparse.Namespace, flags: dict[str, list[str]]) -> None:
        self._args = args
        services = [
            Service(name, partial(ServiceProcess.start, name, flags[name]), partial(until_serving, address))
            for name, address in (("cache", args.cache_listen), ("engine", args.engine_listen))
        ]
        self._supervisor = Supervisor(services, _tell)
        self._stop: asyncio.Future[signal.Signals]

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        for signum in _STOP_SIGNALS:
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # with nohup it stays ignored
                loop.add_signal_handler(signum, self._on_signal, signum)
        serving = asyncio.create_task(self._serve())
        try:
            either: set[asyncio.Future[Any]] = {serving, self._stop}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                return 128 + self._stop.result()
            await serving
        except GivenUp as given_up:
            complain(str(given_up), reason="SERVICE_ENDED", is_json=self._args.json)
            return EXIT_USAGE if given_up.process.exit_code == EXIT_USAGE else EXIT_FAILED
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self._supervisor.end(_GRACE_S)
        raise AssertionError("services are kept running until a signal")

    async def _serve(self) -> None:
        """Start both services, report when they serve, and keep them running. Raises GivenUp."""
        await self._supervisor.start()
        telling = asyncio.create_task(self._tell_ready())
        try:
            await self._supervisor.keep()
        finally:
            telling.cancel()

    async def _tell_ready(self) -> None:
        while True:
            try:
                return print(await _ready_text(self._args), flush=True)
            except KvkeeperError:  # a service has died already and is being started again
                await until_serving(self._args.cache_listen)
                await until_serving(self._args.engine_listen)

    def _on_signal(self, signum: signal.Signals) -> None:
        if not self._stop.done():
            self._stop.set_result(signum)
            return
        self._supervisor.kill()  # asked twice: no more grace


def _tell(text: str) -> None:
    print(f"kvkeeper: {text}", file=sys.stderr, flush=True)


async def _ready_text(args: argparse.Namespace) -> str:
    async with AsyncCacheClient(args.cache_listen) as cache_client:
        pools = [pool_line(pool) for pool in (await cache_client.capabilities()).pools]
    async with AsyncEngineClient(args.engine_listen) as engine_client:
        model = await engine_client.model()
    next_command = f'{_program()} generate "{_FIRST_PROMPT}"'
    if args.engine_listen != targets.ENGINE:
        next_command += f" --engine {shlex.quote(args.engine_listen)}"
    if args.json:
        report = {
            "ready": True,
            "cache": args.cache_listen,
            "engine": args.engine_listen,
            "model": model.model_id,
            "max_tokens_per_sequence": model.max_tokens_per_sequence,
            "pools": pools,
            "next": next_command,
        }
        return json.dumps(report)
    rows = [
        ("cache service", args.cache_listen),
        ("engine service", args.engine_listen),
        ("model", model_line(model)),
        ("longest", f"{model.max_tokens_per_sequence:,} tokens, prompt and output"),
        ("pool", "; ".join(pools)),
        ("next", next_command),
    ]
    return f"ready\n{facts(rows, '  ')}"


def _program() -> str:
    """This program as it can be typed again: from a virtual environment that is not active, with its path."""
    program = Path(sys.argv[0])
    if program.name != "kvkeeper":
        return f"{shlex.quote(sys.executable)} -m kvkeeper.cli"
    found = shutil.which("kvkeeper")
    return "kvkeeper" if found and program.samefile(found) else shlex.quote(str(program))


def _flags_of_services(args: argparse.Namespace) -> dict[str, list[str]]:
    """Arguments of each service. A flag that starts with a service's name goes to that service alone. Raises UsageFailure."""
    flags = {
        "cache": ["--listen", args.cache_listen, "--log-level", args.log_level],
        "engine": ["--listen", args.engine_listen, "--log-level", args.log_level, "--cache", args.cache_listen],
    }
    if args.pool_memory is not None:
        flags["cache"] += ["--pool-memory", args.pool_memory]
    if args.host_memory is not None:
        flags["cache"] += ["--host-memory", args.host_memory]
    if args.model is not None:
        flags["engine"] += ["--model", args.model]
    own_flags = _split(args.other_flags)
    if args.keep:
        flags["cache"] += ["--keep"]
        if "KVKEEPER_CACHE_MEMORY_DIR" not in os.environ:
            flags["cache"] += ["--memory-dir", memory_dir(args.cache_listen)]
    for service in flags:
        flags[service] += own_flags[service]
    return flags


def memory_dir(cache_listen: str) -> str:
    """A folder on tmpfs for the memory of the cache service at this address."""
    name = hashlib.sha256(cache_listen.encode()).hexdigest()[:16]
    return f"/dev/shm/kvkeeper-{os.getuid()}-{name}"


def _split(words: Sequence[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {"cache": [], "engine": []}
    service = ""
    for word in words:
        if word.startswith("-"):
            service, _, rest = word.removeprefix("--").partition("-")
            if service not in flags or not word.startswith("--") or not rest:
                raise UsageFailure(f"unknown flag {word}; a flag of a service is written --cache-... or --engine-...")
            flags[service].append(f"--{rest}")
        elif service:
            flags[service].append(word)
        else:
            raise UsageFailure(f"unexpected argument {word}")
    return flags
