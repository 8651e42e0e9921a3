"""Messages of a watch as runs of blocks, each below the one before it."""

from typing import Any

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.engine_service.cache_session.cache_events import RemovedBlocks, StoredBlocks, _events

ROOT = b"r" * 32


def message(kind: "pb.EventKind", chain: str = "", parents: str = "", tokens: Any = ()) -> pb.WatchEventsResponse:
    """A letter stands for a name; `r` is that above all first blocks."""
    return pb.WatchEventsResponse(
        kind=kind,
        block_names=[letter.encode() * 32 for letter in chain],
        parent_names=[letter.encode() * 32 for letter in parents],
        token_ids=np.array(tokens, "<i4").tobytes(),
    )


def told(found: pb.WatchEventsResponse) -> list[Any]:
    """As letters, with the tokens of each run."""
    events: list[Any] = []
    for event in _events(found, ROOT, 2):
        letters = "".join(name[:1].decode() for name in event.names)
        if isinstance(event, StoredBlocks):
            parent = None if event.parent is None else event.parent[:1].decode()
            events.append((parent, letters, event.token_ids.tolist()))
        else:
            assert isinstance(event, RemovedBlocks)
            events.append(letters)
    return events


@pytest.mark.parametrize("kind", [pb.EVENT_KIND_SNAPSHOT, pb.EVENT_KIND_STORED])
def test_each_run_has_the_parent_of_its_first_block(kind: "pb.EventKind") -> None:
    found = told(message(kind, "abcde", "rabra", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
    assert found == [(None, "abc", [[1, 2], [3, 4], [5, 6]]), (None, "d", [[7, 8]]), ("a", "e", [[9, 10]])]


def test_what_is_removed_needs_no_tokens() -> None:
    assert told(message(pb.EVENT_KIND_REMOVED, "ab")) == ["ab"]


@pytest.mark.parametrize(
    "kind",
    [pb.EVENT_KIND_SNAPSHOT_END, pb.EVENT_KIND_TIER_CHANGED, pb.EVENT_KIND_PRESSURE, pb.EVENT_KIND_POOL_REPLACED, 99],
)
def test_other_news_are_none_of_the_gateways(kind: "pb.EventKind") -> None:
    assert told(message(kind, "a")) == []


def test_a_service_that_tells_no_tokens_tells_no_blocks() -> None:
    assert told(message(pb.EVENT_KIND_STORED, "a", "r")) == []
