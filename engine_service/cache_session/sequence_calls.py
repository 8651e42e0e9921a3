"""SequenceCalls: tells the cache service of sequences that wait, as many as there are in one call.

A cache service of before there was such a call gets a call for each of them, from the first one that it does not know on.
"""

import asyncio
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict

import grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.new_sequence import Created, NewSequence
from kvkeeper.client.session import AsyncCacheSession

from ..values.request import Sequence
from .failures import is_invalid


class SequenceCalls:
    """The calls of one session."""

    def __init__(self, session: AsyncCacheSession) -> None:
        self._session = session
        self._takes_many = True  # as far as is known

    async def create(self, sequences: SequenceOf[Sequence]) -> list[int | KvkeeperError]:
        """Of each sequence its start number, or why it was refused. Raises KvkeeperError where that is not known."""
        try:
            created = await self._created([_new_sequence(sequence) for sequence in sequences])
        except KvkeeperError as error:
            if not is_invalid(error):
                raise
            return [error] * len(sequences)  # a prompt alone that no message can carry
        return [each if isinstance(each, KvkeeperError) else each.start_number for each in created]

    async def _created(self, sequences: list[NewSequence]) -> list[Created]:
        if self._takes_many:
            try:
                return await self._session.create_sequences(sequences)
            except KvkeeperError as error:
                if error.code is not grpc.StatusCode.UNIMPLEMENTED or error.reason:
                    raise
                self._takes_many = False
        return await asyncio.gather(*(self._create_one(sequence) for sequence in sequences))

    async def _create_one(self, new: NewSequence) -> Created:
        try:
            return await self._session.create_sequence(
                new.sequence_id,
                new.token_ids,
                new.max_tokens,
                new.tenant,
                new.priority,
                new.retention,
                new.start_number,
                new.reuse_hint,
            )
        except KvkeeperError as error:
            return error


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
