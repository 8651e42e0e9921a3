"""The pages have a row for every name that the code gives: reasons of errors and ends, promises, eviction policies."""

import re
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.engine.v1 import engine_service_pb2 as engine_pb
from tests.support.documents.markdown import ROOT, page

ENUMS = {
    "Reasons of the cache service": cache_pb.ErrorReason,
    "Reasons of the engine service": engine_pb.ErrorReason,
    "How a continuation ended": engine_pb.FinishReason,
    "Why a prompt is not cached": cache_pb.MatchEnd,
}


def _names(enum: Any) -> list[str]:
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return [name.removeprefix(prefix) for name in enum.DESCRIPTOR.values_by_name if not name.endswith("_UNSPECIFIED")]


@pytest.mark.parametrize("heading", ENUMS)
def test_every_reason_has_one_row_with_what_to_do(heading: str) -> None:
    rows = page("docs/operate/watch.md").table(heading)
    assert sorted(row[0] for row in rows) == sorted(f"`{name}`" for name in _names(ENUMS[heading]))
    assert all(len(row) == len(rows[0]) and all(row) for row in rows)


def test_every_row_of_the_soak_is_a_promise_that_is_told() -> None:
    told = {int(row[0]) for row in page("docs/inside/reliability.md").table("What is promised, and the test that proves it")}
    rows = {int(row) for row in re.findall(r"^    Row\((\d+),", (ROOT / "tests/soak/rows.py").read_text(), re.MULTILINE)}
    assert len(rows) > 20
    assert rows <= told


def test_every_eviction_policy_has_one_row_and_the_default_is_told() -> None:
    names = [row[0] for row in page("docs/operate/eviction.md").table("The policies")]
    assert sorted(name.split("`")[1] for name in names) == sorted(POLICY_NAMES)
    assert [name.split("`")[1] for name in names if "(default)" in name] == [
        PoolConfig(num_blocks=2, block_size=1).eviction_policy
    ]
