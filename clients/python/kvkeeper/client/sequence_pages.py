"""The list of sequences, page by page; for the client of a service and for one session."""

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.transport import AsyncTransport


async def list_sequences(transport: AsyncTransport, session_id: str) -> tuple[pb.SequenceInfo, ...]:
    """Page by page; an empty session_id is all sessions."""
    rows: list[pb.SequenceInfo] = []
    page_token = ""
    while True:
        request = pb.ListSequencesRequest(session_id=session_id, page_size=1000, page_token=page_token)
        page = await transport.call_by_name("ListSequences", request)
        rows += page.sequences
        page_token = page.next_page_token
        if not page_token:
            return tuple(rows)
