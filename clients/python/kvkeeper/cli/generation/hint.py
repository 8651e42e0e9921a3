"""`kvkeeper hint`: what is known of the next use of a cached prompt."""

import argparse
import json
from typing import TYPE_CHECKING

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.console.arguments import whole
from kvkeeper.cli.console.problems import EXIT_OK
from kvkeeper.cli.console.prompt_pools import add_prompt_flags, ask_pools

if TYPE_CHECKING:  # its import takes longer than this command
    from kvkeeper.client import CacheSession

_HINTS = {
    "retain": pb.REUSE_HINT_SOON,
    "demote": pb.REUSE_HINT_NONE,
    "release": pb.REUSE_HINT_UNSPECIFIED,
    "prefetch": pb.REUSE_HINT_UNSPECIFIED,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=tuple(_HINTS),
        help="retain: it is evicted last; demote: what leads to its end alone is evicted first; release: take either back;"
        " prefetch: bring what lower tiers have of it to the host tier, and release it",
    )
    parser.add_argument(
        "--retain-ms", type=whole, default=0, metavar="MS", help="how long it is retained, up to an hour (default: a minute)"
    )
    add_prompt_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Raises KvkeeperError."""
    if args.retain_ms and args.action != "retain":
        args.usage_error("--retain-ms is for retain")

    def give(session: "CacheSession", token_ids: tuple[int, ...]) -> tuple[int, int]:
        hint = pb.PrefixHint(
            token_ids=token_ids,
            tenant=args.tenant,
            adapter=args.adapter,
            cache_salt=args.cache_salt,
            reuse_hint=_HINTS[args.action],
            retain_ms=args.retain_ms,
            prefetch=args.action == "prefetch",
        )
        return session.hint_prefixes(hint)[0], len(token_ids)

    model, counts = ask_pools(args, "hint", give)
    if args.json:
        print(json.dumps({"pools": [{"num_hinted_tokens": hinted, "num_tokens": tokens} for hinted, tokens in counts]}))
    else:
        lines = [f"the hint reached {hinted} of {tokens} tokens, which are cached on the device" for hinted, tokens in counts]
        print("\n".join(lines) or f"no pool holds K and V of {model}")
    return EXIT_OK
