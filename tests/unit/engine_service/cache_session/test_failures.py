"""What an answer of the cache service means to a session."""

import grpc
import pytest

from kvkeeper.client import KvkeeperError
from kvkeeper.engine_service.cache_session.failures import refuses_groups


@pytest.mark.parametrize(
    ("metadata", "is_refused"),
    [
        ({"feature": "layer_groups"}, True),
        ({"feature": "layer_group_kind"}, True),
        ({"field": "spec.layout"}, True),
        ({"feature": "tensor_parallel_size"}, False),
        ({"field": "spec.groups.window_tokens"}, False),
    ],
)
def test_a_service_that_knows_no_such_groups_is_told_apart(metadata: dict[str, str], is_refused: bool) -> None:
    """Then the engine continues with one table for all layers; any other refusal is a fault."""
    error = KvkeeperError(grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED", "not served by this build", metadata)
    assert refuses_groups(error) is is_refused
