"""SequenceCalls: reports waiting sequences to the cache service, as many as there are in one call."""

from collections.abc import Sequence as SequenceOf
from dataclasses import asdict

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.new_sequence import NewSequence
from kvkeeper.client.session import AsyncCacheSession

from ..values.request import Sequence
from .failures import is_invalid


class SequenceCalls:
    """The calls of one session."""

    def __init__(self, session: AsyncCacheSession) -> None:
        self._session = session

    async def create(self, sequences: SequenceOf[Sequence]) -> list[int | KvkeeperError]:
        """The start number of each sequence, or why it was refused. Raises KvkeeperError where that is not known."""
        try:
            created = await self._session.create_sequences([_new_sequence(sequence) for sequence in sequences])
        except KvkeeperError as error:
            if not is_invalid(error):
                raise
            return [error] * len(sequences)  # a prompt alone that no message can carry
        return [each if isinstance(each, KvkeeperError) else each.start_number for each in created]


def _new_sequence(sequence: Sequence) -> NewSequence:
    request = sequence.request
    assert sequence.sequence_id is not None
    return NewSequence(
        sequence.sequence_id,
        sequence.token_ids,
        request.max_len,
        request.tenant,
        request.priority,
        None if request.retention is None else pb.Retention(**asdict(request.retention)),
        request.start_number,
        int(request.reuse_hint),  # type: ignore[arg-type]  # the numbers are the protocol's
    )
