"""`kvkeeper explain`: how much of a prompt is cached right now, and why not more."""

import argparse
import json

from kvkeeper.cli.console.messages import as_json
from kvkeeper.cli.console.problems import EXIT_OK
from kvkeeper.cli.console.prompt_pools import add_prompt_flags, ask_pools

add_flags = add_prompt_flags


def run(args: argparse.Namespace) -> int:
    """Asks the engine for the tokens and the model, then the cache service for the match."""
    scope = args.tenant, args.adapter, args.cache_salt
    model, replies = ask_pools(args, "explain", lambda session, token_ids: session.explain_match(token_ids, *scope))
    if args.json:
        print(json.dumps({"pools": [as_json(answer) for answer in replies]}))
    else:
        print("\n".join(answer.explanation for answer in replies) or f"no pool holds K and V of {model}")
    return EXIT_OK
