"""`kvkeeper sequences`: the live sequences of all sessions."""

import argparse

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.console.addresses import add_cache_flag, add_json_flag
from kvkeeper.cli.console.messages import print_list
from kvkeeper.cli.console.outcome import OPTIONS
from kvkeeper.cli.console.problems import EXIT_OK
from kvkeeper.client import CacheClient

_HEADERS = ("session", "sequence", "state", "tokens", "committed", "reserved", "hit", "retention", "priority", "steps")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", default="", metavar="ID", help="show one session only")
    add_cache_flag(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with CacheClient(args.cache, OPTIONS) as client:
        sequences = client.list_sequences(args.session)
    print_list("sequences", sequences, _HEADERS, _row, is_json=args.json)
    return EXIT_OK


def _row(sequence: pb.SequenceInfo) -> tuple[object, ...]:
    return (
        sequence.session_id[:8],
        sequence.sequence_id,
        pb.SequenceState.Name(sequence.state).removeprefix("SEQUENCE_STATE_").lower(),
        sequence.num_tokens,
        sequence.num_committed_tokens,
        sequence.num_reserved_tokens,
        sequence.num_hit_tokens,
        _retention(sequence),
        sequence.priority,
        sequence.num_accesses,
    )


def _retention(sequence: pb.SequenceInfo) -> str:
    """Sink + window, in tokens."""
    if not sequence.HasField("retention"):
        return "-"
    return f"{sequence.retention.num_sink_tokens}+{sequence.retention.num_window_tokens}"
