"""`kvkeeper requests`: the requests that wait or run in the engine, of all conversations or of one."""

import argparse

from kvkeeper.cli.console.addresses import add_engine_flag, add_json_flag
from kvkeeper.cli.console.arguments import utf8
from kvkeeper.cli.console.messages import print_list
from kvkeeper.cli.console.outcome import OPTIONS
from kvkeeper.cli.console.problems import EXIT_OK
from kvkeeper.client import EngineClient
from kvkeeper.engine.v1 import engine_service_pb2 as pb

_HEADERS = ("request", "conversation", "state", "prompt", "new", "n", "priority", "seconds")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session-id", default="", type=utf8, metavar="NAME", help="show one conversation only")
    add_engine_flag(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with EngineClient(args.engine, OPTIONS) as client:
        requests = client.list_requests(args.session_id)
    print_list("requests", requests, _HEADERS, _row, is_json=args.json)
    return EXIT_OK


def _row(request: pb.RequestInfo) -> tuple[object, ...]:
    return (
        request.request_id,
        request.session_id or "-",
        pb.RequestState.Name(request.state).removeprefix("REQUEST_STATE_").lower(),
        request.prompt_tokens,
        request.new_tokens,
        request.n,
        request.priority,
        request.age_ms / 1000,
    )
