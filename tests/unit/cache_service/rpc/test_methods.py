"""Each RPC of the protocol has one handler in one group of calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.rpc.create_handler import CreateHandler
from kvkeeper.cache_service.rpc.eviction_calls import EvictionCalls
from kvkeeper.cache_service.rpc.inspection_calls import InspectionCalls
from kvkeeper.cache_service.rpc.kv_calls import KvCalls
from kvkeeper.cache_service.rpc.lane_calls import LANE_CALLS
from kvkeeper.cache_service.rpc.methods import get_handlers
from kvkeeper.cache_service.rpc.prefix_calls import PrefixCalls
from kvkeeper.cache_service.rpc.sequence_calls import SequenceCalls
from kvkeeper.cache_service.rpc.session_calls import SessionCalls
from kvkeeper.cache_service.rpc.step_handler import StepHandler
from kvkeeper.cache_service.rpc.step_stream import StepStreams
from kvkeeper.common.trust.roles import CACHE_SERVICE, TABLE

GROUPS: list[Any] = [
    SessionCalls,
    StepHandler,
    StepStreams,
    CreateHandler,
    SequenceCalls,
    PrefixCalls,
    EvictionCalls,
    KvCalls,
    InspectionCalls,
]


def test_every_rpc_has_one_handler() -> None:
    num_rpcs = len(pb.DESCRIPTOR.services_by_name["CacheService"].methods)
    assert len(get_handlers(GROUPS)) == num_rpcs


def test_a_group_answers_nothing_but_rpcs() -> None:
    """A misspelled handler would be of no use; the names that are no RPCs are those that other parts call."""
    public = {name for group in GROUPS for name in vars(group) if not name.startswith("_")}
    assert public == {*get_handlers(GROUPS), "apply", "after_answer", "create_some"}


def test_a_missing_handler_is_found() -> None:
    with pytest.raises(AssertionError, match="GetBlock has 0 handlers"):
        get_handlers([group for group in GROUPS if group is not InspectionCalls] + [SimpleNamespace(check_invariants=None)])


def test_a_second_handler_is_found() -> None:
    with pytest.raises(AssertionError, match="GetStats has 2 handlers"):
        get_handlers([*GROUPS, SimpleNamespace(get_stats=None)])


def test_a_lane_carries_the_calls_of_those_who_may_step() -> None:
    """No credential is shown on a lane: the one that opened its session counts."""
    roles = TABLE[CACHE_SERVICE]
    assert {roles[name] for name in (*LANE_CALLS, "Step")} == {roles["OpenSession"]}
