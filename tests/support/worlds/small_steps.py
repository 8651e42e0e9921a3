"""Steps of one sequence over the API: what they are made of, and their answers as arrays."""

from typing import Any

from kvkeeper.client.steps import decode
from tests.support.worlds.cache_api import Session, le32, le64


async def step(session: Session, step_id: int, **columns: Any) -> Any:
    """The answer, with its columns as arrays."""
    return decode((await session.step(step_id, **columns)).SerializeToString())


def start(sequence_id: int) -> dict[str, bytes]:
    return {"start_sequence_ids": le64(sequence_id), "start_max_new_tokens": le32(64), "start_max_hit_tokens": le32(64)}
