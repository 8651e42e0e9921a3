"""`kvkeeper status`: whether both services take requests, where they are, and what they serve."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.cli.console.addresses import add_cache_flag, add_engine_flag, add_json_flag
from kvkeeper.cli.console.outcome import OPTIONS
from kvkeeper.cli.console.problems import EXIT_DOWN, EXIT_OK, complain
from kvkeeper.cli.console.tables import table
from kvkeeper.cli.show.readiness import is_serving
from kvkeeper.client import CacheClient, EngineClient, KvkeeperError
from kvkeeper.common.service.sizes import size


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The state of one service; detail is a text for people."""

    service: str
    state: str  # "up", "not ready", "down", or the reason why it refuses to say
    address: str
    version: str = ""
    detail: str = ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_cache_flag(parser)
    add_engine_flag(parser)
    parser.add_argument("--only", choices=("cache", "engine"), help="ask one of them, as a container's health check does")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    asked = (("cache", args.cache, _cache), ("engine", args.engine, _engine))
    states = [_state(*each) for each in asked if args.only in (None, each[0])]
    rows = [row for row, _ in states]
    if args.json:
        print(json.dumps({row.service: asdict(row) for row in rows}))
    else:
        headers = ("service", "state", "address", "version", "serves")
        print(table(headers, [(row.service, row.state, row.address, row.version or "-", row.detail or "-") for row in rows]))
    for _, why_down in states:
        if why_down:
            complain(why_down, reason="SERVICE_DOWN", is_json=args.json)
    return EXIT_OK if all(row.state == "up" for row in rows) else EXIT_DOWN


def _state(service: str, address: str, ask: Callable[[str], tuple[str, str, str]]) -> tuple[ServiceStatus, str]:
    """The state of a service, and why it is down, where it is."""
    try:
        version, detail, why_not = ask(address)
        if not why_not and not is_serving(service, address, OPTIONS):
            why_not = "it is starting or stopping"
    except KvkeeperError as error:
        state = "down" if error.service_down else (error.reason or error.code.name).lower().replace("_", " ")
        return ServiceStatus(service, state, address), error.message if error.service_down else ""
    return ServiceStatus(service, "not ready" if why_not else "up", address, version, why_not or detail), ""


def _cache(address: str) -> tuple[str, str, str]:
    """The version, what the service serves, and why it does not serve, where that is known."""
    with CacheClient(address, OPTIONS) as client:
        capabilities = client.capabilities()
    return capabilities.version, "; ".join(map(pool_line, capabilities.pools)) or "no pool yet", ""


def _engine(address: str) -> tuple[str, str, str]:
    """The same of an engine, which refuses requests while it has no session on its cache service."""
    with EngineClient(address, OPTIONS) as client:
        model, has_session = client.model(), bool(client.stats().cache_session_id)
    return model.version, model_line(model), "" if has_session else "its cache service does not answer"


def pool_line(pool: cache_pb.PoolInfo) -> str:
    """One pool in a few words."""
    words = [f"{pool.num_blocks:,} blocks of {pool.block_size} tokens", size(pool.arena_bytes)]
    if pool.spec.layout == cache_pb.KV_LAYOUT_SCALED:
        words.append(f"K and V in {dtype_word(pool.spec.kv_dtype)}")
    tails = [group for group in pool.spec.groups if group.kind == cache_pb.LAYER_GROUP_KIND_TAIL]
    if tails:
        words.append(f"a tail in {len(tails)} groups of layers")
    elif pool.spec.groups:
        words.append(f"{len(pool.spec.groups)} groups of layers")
    return f"{', '.join(words)}, for {pool.spec.model_id}"


def dtype_word(kv_dtype: int) -> str:
    """An element type in a word, such as "int8"."""
    return cache_pb.KvDtype.Name(kv_dtype).removeprefix("KV_DTYPE_").lower()


def model_line(model: Any) -> str:
    """The model of a GetModelResponse in a few words."""
    return f"{model.model_id} ({model.architecture}, {model.num_parameters / 1e6:.1f} M parameters)"
