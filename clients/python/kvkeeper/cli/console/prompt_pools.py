"""What the commands share that ask the pools of an engine's model about a prompt: `explain`, `hint`."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvkeeper.cli.console.addresses import add_cache_flag, add_engine_flag, add_json_flag, add_scope_flags
from kvkeeper.cli.console.arguments import token_list, utf8
from kvkeeper.cli.console.outcome import OPTIONS
from kvkeeper.client import CacheClient, EngineClient

if TYPE_CHECKING:  # the import of a session takes longer than these commands
    from kvkeeper.client import CacheSession

Reply = TypeVar("Reply")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", type=utf8, help="text, as for generate")
    parser.add_argument(
        "--token-ids", action="store_true", help="the prompt is ids of tokens, as 1,2,3, and no text: those of a chat, for one"
    )
    parser.add_argument("--tenant", default="", type=utf8, metavar="NAME", help="tenant whose cache is asked")
    add_scope_flags(parser)
    add_cache_flag(parser)
    add_engine_flag(parser)
    add_json_flag(parser)


def ask_pools(
    args: argparse.Namespace, name: str, ask: Callable[["CacheSession", tuple[int, ...]], Reply]
) -> tuple[str, list[Reply]]:
    """The engine makes tokens of the prompt, and `ask` asks each pool of its model. name: of the sessions.

    Returns the model, and the replies. Raises KvkeeperError.
    """
    try:
        given = token_list(args.prompt) if args.token_ids else None
    except argparse.ArgumentTypeError as error:
        args.usage_error(f"--token-ids: {error}")
    args.asks = "engine"
    with EngineClient(args.engine, OPTIONS) as engine:
        model = engine.model()
        token_ids = engine.tokenize(args.prompt) if given is None else tuple(given)
    args.asks = "cache"
    replies: list[Reply] = []
    with CacheClient(args.cache, OPTIONS) as cache:
        for pool in cache.capabilities().pools:
            if pool.spec.revision == model.revision:  # an engine may serve a model under another name than its own
                with cache.open_session(pool.spec, client_name=name) as session:
                    replies.append(ask(session, token_ids))
    return model.model_id, replies
