"""`kvkeeper up`: both services as processes of their own, kept running until a signal ends them.

The cache service starts first and ends last, so that an engine always finds it. A service that dies is started again while the
other stays: this is why there are two processes. However `up` itself ends, no process is left behind.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from kvkeeper.cli.console.addresses import add_json_flag
from kvkeeper.cli.console.problems import EXIT_FAILED, EXIT_USAGE, UsageFailure, complain
from kvkeeper.cli.console.tables import facts
from kvkeeper.cli.show.readiness import until_serving
from kvkeeper.cli.show.status import model_line, pool_line
from kvkeeper.cli.start import http
from kvkeeper.cli.start.processes import ServiceProcess
from kvkeeper.cli.start.supervisor import Service
from kvkeeper.cli.start.together import Together, say
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient
from kvkeeper.client.targets import ENGINE, cache_address, engine_address

# More than a block long, so that typing it again shows a prefix hit.
_FIRST_PROMPT = "def fibonacci(n):  # the first n Fibonacci numbers, smallest first"

# Flags of `up` that go to one service, which has them by the same name.
_OF_ONE = (("cache", "pool-memory"), ("cache", "host-memory"), ("engine", "model"), ("engine", "model-name"))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs both services until Ctrl-C; one that dies is started again. Any flag of one service is written with"
        " its name in front: --cache-max-sequences 64 (see kvkeeper cache --help, kvkeeper engine --help)."
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="Hugging Face folder, or smollm2: a small real model, fetched once (default: the embedded demo model, a toy)",
    )
    parser.add_argument(
        "--http", metavar="ADDRESS", nargs="?", const=http.LISTEN, help=f"also speak HTTP, there or at {http.LISTEN}"
    )
    add_service_flags(parser)


def add_service_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that starts both services."""
    parser.add_argument(
        "--model-name", metavar="NAME", help="what clients call the model (default: its folder's name, or a hub's)"
    )
    parser.add_argument("--pool-memory", metavar="SIZE", help="memory of a pool, taken at start: 1GiB, or 80%% of what is free")
    parser.add_argument("--host-memory", metavar="SIZE", help="host tier of a pool, for what the pool has no room for")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep what is cached when both services end, for the next start; it lies in a folder of --cache-memory-dir,"
        " by default one in /dev/shm",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings of both, in tables [cache] and [engine]")
    parser.add_argument("--cache-listen", metavar="ADDRESS", help=f"(default: {cache_address()})")
    parser.add_argument("--engine-listen", metavar="ADDRESS", help=f"(default: {engine_address()})")
    parser.add_argument("--log-level", metavar="LEVEL", help="of both (default: info)")
    add_json_flag(parser)
    parser.set_defaults(takes_other_flags=True)


def run(args: argparse.Namespace) -> int:
    is_open = http.trusts_network(args.other_flags)
    if args.http is not None and (exit_code := http.refuse(args, "--http", args.http, is_open=is_open)) is not None:
        return exit_code
    flags = checked_flags(args, *([http.NAME] if args.http else []))
    if isinstance(flags, int):
        return flags
    services = make_services(args, flags)
    if args.http:
        http.refuse_tls(args, flags[http.NAME])
        services.append(http.service(args.http, args.engine_listen, flags[http.NAME]))
    together = Together(services, partial(_ready_text, args), is_json=args.json)
    return together.run("stopped; all services have ended" if args.http else "stopped; both services have ended")


def checked_flags(args: argparse.Namespace, *others: str) -> dict[str, list[str]] | int:
    """Flags of both services, and of others those that were typed; an exit code where the services cannot be started."""
    from kvkeeper.cli.models.gguf import ConversionError
    from kvkeeper.cli.models.named import dtype_flags, find_model
    from kvkeeper.cli.start.checks import check_start
    from kvkeeper.cli.start.pool_size import find_pool_flags
    from kvkeeper.common.service.process import StartError

    named = args.model
    try:
        args.model = args.model and find_model(args.model, say)
    except ConversionError as error:
        complain(f"--model {args.model}: {error}", reason="NOT_STARTED", is_json=args.json)
        return EXIT_FAILED
    try:
        _find_addresses(args)
        flags = _flags_of_services(args, others)
        flags["engine"] += dtype_flags(named, flags["engine"], os.environ)
        for service, address in (("cache", args.cache_listen), ("engine", args.engine_listen)):
            if address.endswith(":0"):
                raise UsageFailure(f"--{service}-listen: a fixed port, so that others find it")
    except UsageFailure as error:
        args.usage_error(str(error))
    try:
        flags["cache"] += find_pool_flags(flags["cache"], *check_start(flags), say)
    except UsageFailure as error:
        complain(str(error), reason="USAGE", is_json=args.json)
        return EXIT_USAGE
    except StartError as error:
        complain(str(error), reason="NOT_STARTED", is_json=args.json)
        return EXIT_FAILED
    return flags


def make_services(args: argparse.Namespace, flags: Mapping[str, list[str]]) -> list[Service]:
    """Both services; the cache service starts first."""
    return [
        Service(name, partial(ServiceProcess.start, name, flags[name]), partial(until_serving, address))
        for name, address in (("cache", args.cache_listen), ("engine", args.engine_listen))
    ]


async def _ready_text(args: argparse.Namespace) -> str:
    async with AsyncCacheClient(args.cache_listen) as cache_client:
        pools = [pool_line(pool) for pool in (await cache_client.capabilities()).pools]
    async with AsyncEngineClient(args.engine_listen) as engine_client:
        model = await engine_client.model()
    next_command = f"{_program()} chat" if _has_template(args.model) else f'{_program()} generate "{_FIRST_PROMPT}"'
    if args.engine_listen != ENGINE:
        next_command += f" --engine {shlex.quote(args.engine_listen)}"
    if args.json:
        report = {
            "ready": True,
            "cache": args.cache_listen,
            "engine": args.engine_listen,
            **({"http": f"http://{args.http}/v1"} if args.http else {}),
            "model": model.model_id,
            "max_tokens_per_sequence": model.max_tokens_per_sequence,
            "pools": pools,
            "next": next_command,
        }
        return json.dumps(report)
    rows = [
        ("cache service", args.cache_listen),
        ("engine service", args.engine_listen),
        *([("http", f"http://{args.http}/v1"), ("page", f"http://{args.http}/")] if args.http else []),
        ("model", model_line(model)),
        ("longest", f"{model.max_tokens_per_sequence:,} tokens, prompt and output"),
        ("pool", "; ".join(pools)),
        ("next", next_command),
    ]
    return f"ready\n{facts(rows, '  ')}"


def _has_template(model: str | None) -> bool:
    """Whether the model's folder has a chat template, in a file of its own or among the settings of its tokenizer."""
    files = [Path(model or "", name) for name in ("chat_template.jinja", "tokenizer_config.json")]
    return any("{%" in file.read_text(encoding="utf-8", errors="replace") for file in files if model and file.is_file())


def _program() -> str:
    """This program as it can be typed again: from a virtual environment that is not active, with its path."""
    program = Path(sys.argv[0])
    if program.name != "kvkeeper":
        return f"{shlex.quote(sys.executable)} -m kvkeeper.cli"
    found = shutil.which("kvkeeper")
    return "kvkeeper" if found and program.samefile(found) else shlex.quote(str(program))


def _find_addresses(args: argparse.Namespace) -> None:
    """Addresses that were not typed: those of the file, or the usual ones. Raises UsageFailure."""
    from kvkeeper.common.service.config_file import read_addresses
    from kvkeeper.common.service.settings import ConfigError

    try:
        of_file = read_addresses(Path(args.config)) if args.config else {}
    except ConfigError as error:
        raise UsageFailure(str(error)) from None
    args.cache_listen = args.cache_listen or of_file.get("cache", cache_address())
    args.engine_listen = args.engine_listen or of_file.get("engine", engine_address())


def _flags_of_services(args: argparse.Namespace, others: Sequence[str]) -> dict[str, list[str]]:
    """Arguments of each service, and of others those that were typed. Raises UsageFailure.

    A flag that starts with the name of one of them goes to that one alone.
    """
    both = ["--config", args.config] if args.config else []
    both += ["--log-level", args.log_level] if args.log_level else []
    flags: dict[str, list[str]] = {
        "cache": ["--listen", args.cache_listen, *both],
        "engine": ["--listen", args.engine_listen, "--cache", args.cache_listen, *both],
        **{other: [] for other in others},
    }
    for service, name in _OF_ONE:
        if (value := getattr(args, name.replace("-", "_"))) is not None:
            flags[service] += [f"--{name}", value]
    own_flags = _split(args.other_flags, tuple(flags))
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


def _split(words: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {name: [] for name in names}
    service = ""
    for word in words:
        if word.startswith("-"):
            service, _, rest = word.removeprefix("--").partition("-")
            if service not in flags or not word.startswith("--") or not rest:
                written = " or ".join(f"--{name}-..." for name in names)
                raise UsageFailure(f"unknown flag {word}; a flag of a service is written {written}")
            flags[service].append(f"--{rest}")
        elif service:
            flags[service].append(word)
        else:
            raise UsageFailure(f"unexpected argument {word}")
    return flags
