"""`kvkeeper up`: both services as processes of their own, ended together.

The cache service comes first and goes last, so that an engine never looks for what is not there. When one ends by
itself the other is ended too and one line says why. However `up` itself ends, nothing is left behind.
"""

import argparse
import asyncio
import json
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvkeeper.cli.addresses import add_json_flag, cache_address, engine_address
from kvkeeper.cli.problems import EXIT_FAILED, EXIT_USAGE
from kvkeeper.cli.processes import ServiceProcess
from kvkeeper.cli.readiness import until_serving
from kvkeeper.cli.status import model_line, pool_line
from kvkeeper.cli.tables import facts
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, targets

_GRACE_S = 20.0  # a service has its own, shorter limit for draining; who is in a hurry asks twice
# More than a block long, so that typing it again shows a prefix hit.
_FIRST_PROMPT = "def fibonacci(n):  # the first n Fibonacci numbers, smallest first"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_parser(commands: Any, text: str) -> None:
    parser = commands.add_parser(
        "up",
        help=text,
        description="Runs both services until Ctrl-C. Any flag of one service is written with its name in front:"
        " --cache-max-sequences 64 (see kvkeeper cache --help, kvkeeper engine --help).",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="PATH", help="Hugging Face folder (default: the embedded demo model)")
    parser.add_argument("--pool-memory", metavar="SIZE", help="memory of a pool, reserved at start, for example 1GiB")
    parser.add_argument("--host-memory", metavar="SIZE", help="host tier of a pool, for what the pool has no room for")
    parser.add_argument("--cache-listen", metavar="ADDRESS", default=cache_address(), help="(default: %(default)s)")
    parser.add_argument("--engine-listen", metavar="ADDRESS", default=engine_address(), help="(default: %(default)s)")
    parser.add_argument("--log-level", metavar="LEVEL", default="warning", help="of both (default: %(default)s)")
    add_json_flag(parser)
    parser.set_defaults(run=run, takes_other_flags=True, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    flags = _flags_of_services(args)
    for service, address in (("cache", args.cache_listen), ("engine", args.engine_listen)):
        if address.endswith(":0"):
            args.usage_error(f"--{service}-listen: a fixed port, so that others find it")
        if _is_taken(address):
            print(f"kvkeeper: somebody serves at {address} already; choose another --{service}-listen", file=sys.stderr)
            return EXIT_FAILED
    exit_code = asyncio.run(_Pair(args, flags).run())
    if exit_code > 128:
        print("kvkeeper: stopped; both services have ended", file=sys.stderr)
    return exit_code


class _Stopped(Exception):
    """Somebody asked for the end."""

    def __init__(self, signum: signal.Signals) -> None:
        self.signum = signum


class _ServiceEnded(Exception):
    """A service ended by itself."""

    def __init__(self, service: ServiceProcess) -> None:
        self.service = service


class _Pair:
    """The two processes, and the signal that ends them."""

    def __init__(self, args: argparse.Namespace, flags: dict[str, list[str]]) -> None:
        self._args = args
        self._flags = flags
        self._running: list[ServiceProcess] = []  # in order of start
        self._stop: asyncio.Future[signal.Signals]

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        for signum in _STOP_SIGNALS:
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup means it
                loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            return await self._serve()
        except _Stopped as stopped:
            return 128 + stopped.signum
        except _ServiceEnded as ended:
            service = ended.service
            others = "".join(f"; ending the {other.name} service" for other in self._running if other is not service)
            print(f"kvkeeper: the {service.name} service {service.how_it_ended()}{others}", file=sys.stderr)
            return EXIT_USAGE if service.exit_code == EXIT_USAGE else EXIT_FAILED
        finally:
            for service in reversed(self._running):
                await service.end(_GRACE_S)

    async def _serve(self) -> NoReturn:
        """Start both, say so, and wait. Ends with _Stopped or _ServiceEnded."""
        args = self._args
        for name, address in (("cache", args.cache_listen), ("engine", args.engine_listen)):
            self._running.append(await ServiceProcess.start(name, self._flags[name]))
            await self._unless_ended(until_serving(address))
        print(await self._unless_ended(_ready_text(args)), flush=True)
        while True:
            await self._unless_ended(asyncio.Event().wait())

    async def _unless_ended(self, work: Awaitable[Any]) -> Any:
        """What the work gives. Raises _Stopped or _ServiceEnded when that comes first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                {task, self._stop, *(service.ended for service in self._running)}, return_when=asyncio.FIRST_COMPLETED
            )
            if self._stop.done():
                raise _Stopped(self._stop.result())
            for service in self._running:
                if service.ended.done():
                    raise _ServiceEnded(service)
            return await task
        finally:
            task.cancel()

    def _on_signal(self, signum: signal.Signals) -> None:
        if not self._stop.done():
            self._stop.set_result(signum)
            return
        for service in self._running:  # asked twice: no more grace
            service.kill()


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
            "pools": pools,
            "next": next_command,
        }
        return json.dumps(report)
    rows = [
        ("cache service", args.cache_listen),
        ("engine service", args.engine_listen),
        ("model", model_line(model)),
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
    """Arguments of each service. What is prefixed with a service's name is that service's own flag."""
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
    for service, own_flags in _split(args.other_flags, args).items():
        flags[service] += own_flags
    return flags


def _split(words: Sequence[str], args: argparse.Namespace) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {"cache": [], "engine": []}
    service = ""
    for word in words:
        if word.startswith("-"):
            service, _, rest = word.removeprefix("--").partition("-")
            if service not in flags or not word.startswith("--") or not rest:
                args.usage_error(f"unknown flag {word}; a flag of a service is written --cache-... or --engine-...")
            flags[service].append(f"--{rest}")
        elif service:
            flags[service].append(word)
        else:
            args.usage_error(f"unexpected argument {word}")
    return flags


def _is_taken(address: str) -> bool:
    """Whether somebody accepts connections there: its health would be taken for our service's."""
    host, _, port = address.rpartition(":")
    try:
        if address.startswith("unix:"):
            return _accepts(socket.AF_UNIX, address.removeprefix("unix:"))
        return _accepts(socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port)))
    except (ValueError, OSError):
        return False  # no such address: the service says what is wrong with it


def _accepts(family: socket.AddressFamily, where: Any) -> bool:
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(where) == 0
