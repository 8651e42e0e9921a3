"""`kvkeeper status`: whether both services are up, where, and what they serve."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.cli.addresses import add_cache_flag, add_engine_flag, add_json_flag
from kvkeeper.cli.outcome import OPTIONS, tell_down
from kvkeeper.cli.problems import EXIT_DOWN, EXIT_OK
from kvkeeper.cli.tables import size, table
from kvkeeper.client import CacheClient, EngineClient, KvkeeperError


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What is known of one service; detail is for people."""

    service: str
    state: str  # "up", "down", or the reason why it does not serve
    address: str
    version: str = ""
    detail: str = ""


def add_parser(commands: Any, text: str) -> None:
    parser = commands.add_parser("status", help=text, allow_abbrev=False)
    add_cache_flag(parser)
    add_engine_flag(parser)
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = [_state("cache", args.cache, _cache), _state("engine", args.engine, _engine)]
    if args.json:
        print(json.dumps({row.service: asdict(row) for row in rows}))
    else:
        headers = ("service", "state", "address", "version", "serves")
        print(table(headers, [(row.service, row.state, row.address, row.version or "-", row.detail or "-") for row in rows]))
    for row in rows:
        if row.state == "down":
            tell_down(row.service, row.address, args.json)
    return EXIT_OK if all(row.state == "up" for row in rows) else EXIT_DOWN


def _state(service: str, address: str, ask: Callable[[str], tuple[str, str]]) -> ServiceStatus:
    try:
        version, detail = ask(address)
    except KvkeeperError as error:
        state = "down" if error.service_down else (error.reason or error.code.name).lower().replace("_", " ")
        return ServiceStatus(service, state, address)
    return ServiceStatus(service, "up", address, version, detail)


def _cache(address: str) -> tuple[str, str]:
    with CacheClient(address, OPTIONS) as client:
        capabilities = client.capabilities()
    return capabilities.version, "; ".join(map(pool_line, capabilities.pools)) or "no pool yet"


def _engine(address: str) -> tuple[str, str]:
    with EngineClient(address, OPTIONS) as client:
        model = client.model()
    return model.version, model_line(model)


def pool_line(pool: cache_pb.PoolInfo) -> str:
    """One pool in a few words."""
    return f"{pool.num_blocks:,} blocks of {pool.block_size} tokens, {size(pool.arena_bytes)}, for {pool.spec.model_id}"


def model_line(model: Any) -> str:
    """The model of a GetModelResponse in a few words."""
    return f"{model.model_id} ({model.architecture}, {model.num_parameters / 1e6:.1f} M parameters)"
