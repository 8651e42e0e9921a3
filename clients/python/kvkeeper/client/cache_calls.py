"""Calls to the cache service as a whole, with request and answer: shared by the synchronous and the asyncio client.

A Call names a method, holds its request, and turns the answer into what the caller wants; the transport makes it. The calls of
one session are in session_calls.py. Nothing here needs numpy, which takes longer to import than most of these calls take.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.transport import Transport

# Of the cache service's protocol; docs/protocol.md says what needs a new number.
PROTOCOL_VERSION = 1
OLDEST_PROTOCOL_VERSION = 1  # that this client can speak

T = TypeVar("T")

SLICED_TIMEOUT_S = 300.0  # of calls that let others pass: millions of blocks take a minute


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call. request is a list where the method takes a stream; result gets a list where it answers with one.

    least_timeout_s: that the client waits for the answer, whatever its options are.
    """

    method: str
    request: Any
    result: Callable[[Any], T]
    streams_answers: bool = False
    least_timeout_s: float = 0.0


def open_session(
    spec: pb.KvSpec, executor: "pb.Executor", ttl_ms: int, client_name: str, read_only_memory: bool, packs_host_blocks: bool
) -> Call[pb.OpenSessionResponse]:
    """The call raises KvkeeperError where either side is too old for the other."""
    request = pb.OpenSessionRequest(
        spec=spec,
        executor=executor,
        ttl_ms=ttl_ms,
        client_name=client_name,
        protocol_version=PROTOCOL_VERSION,
        read_only_memory=read_only_memory,
        packs_host_blocks=packs_host_blocks,
    )
    return Call("OpenSession", request, _spoken)


def _spoken(opened: pb.OpenSessionResponse) -> pb.OpenSessionResponse:
    """The answer of a service that this client understands. What it opened otherwise ends with its lease."""
    version = opened.protocol_version or 1  # a service of before there were versions
    if version < OLDEST_PROTOCOL_VERSION:
        mine = f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
        text = f"the service speaks version {version} of the protocol, and this client {mine}: upgrade the cache service"
        raise KvkeeperError(grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION_UNSUPPORTED", text)
    return opened


def capabilities() -> Call[pb.GetCapabilitiesResponse]:
    return Call("GetCapabilities", pb.GetCapabilitiesRequest(), whole)


def stats() -> Call[pb.GetStatsResponse]:
    return Call("GetStats", pb.GetStatsRequest(), whole)


def check_invariants() -> Call[pb.CheckInvariantsResponse]:
    return Call("CheckInvariants", pb.CheckInvariantsRequest(), whole, least_timeout_s=SLICED_TIMEOUT_S)


def list_page(session_id: str, page_token: str) -> Call[pb.ListSequencesResponse]:
    request = pb.ListSequencesRequest(session_id=session_id, page_size=1000, page_token=page_token)
    return Call("ListSequences", request, whole)


def whole(answer: Any) -> Any:
    """The answer itself."""
    return answer


def do(transport: Transport, call: Call[T]) -> T:
    """Make the call."""
    method = getattr(transport.stub, call.method)
    make = transport.collect if call.streams_answers else transport.call
    return call.result(make(method, call.request, transport.options.for_at_least(call.least_timeout_s)))


def all_sequences(transport: Transport, session_id: str) -> tuple[pb.SequenceInfo, ...]:
    """Page by page; an empty session_id is all sessions."""
    rows: list[pb.SequenceInfo] = []
    page_token = ""
    while True:
        page = do(transport, list_page(session_id, page_token))
        rows += page.sequences
        page_token = page.next_page_token
        if not page_token:
            return tuple(rows)
