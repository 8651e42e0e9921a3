"""`kvkeeper explain`: how much of a prompt is cached right now, and why not more."""

import argparse
import json

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.console.addresses import add_cache_flag, add_engine_flag, add_json_flag, add_scope_flags
from kvkeeper.cli.console.arguments import utf8
from kvkeeper.cli.console.messages import as_json
from kvkeeper.cli.console.outcome import OPTIONS
from kvkeeper.cli.console.problems import EXIT_OK
from kvkeeper.client import CacheClient, EngineClient


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", type=utf8, help="text, as for generate")
    parser.add_argument("--tenant", default="", type=utf8, metavar="NAME", help="tenant whose cache is asked")
    add_scope_flags(parser)
    add_cache_flag(parser)
    add_engine_flag(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Asks the engine for the tokens and the model, then the cache service for the match."""
    args.asks = "engine"
    with EngineClient(args.engine, OPTIONS) as engine:
        model, token_ids = engine.model(), engine.tokenize(args.prompt)
    args.asks = "cache"
    replies: list[pb.ExplainMatchResponse] = []
    with CacheClient(args.cache, OPTIONS) as cache:
        for pool in cache.capabilities().pools:
            if pool.spec.revision == model.revision:  # an engine may serve a model under another name than its own
                with cache.open_session(pool.spec, client_name="explain") as session:
                    replies.append(session.explain_match(token_ids, args.tenant, args.adapter, args.cache_salt))
    if args.json:
        print(json.dumps({"pools": [as_json(answer) for answer in replies]}))
    else:
        print("\n".join(answer.explanation for answer in replies) or f"no pool holds K and V of {model.model_id}")
    return EXIT_OK
