"""What the scheduler may do on a pool, as far as it follows from the engine's own settings."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.engine_service.cache_session.pool_limits import make_limits
from kvkeeper.engine_service.config import SOURCE


@pytest.mark.parametrize(
    ("flags", "chunk_size"),
    [
        ([], 512),
        (["--device", "cuda"], 2048),
        (["--device", "cuda:1"], 2048),
        (["--device", "cuda", "--chunk-size", "300"], 300),
        (["--chunk-size", "7"], 7),
    ],
)
def test_a_chunk_is_as_long_as_its_device_likes_it_or_as_it_is_told(flags: list[str], chunk_size: int) -> None:
    model: Any = SimpleNamespace(max_len=4096, refuses_retention=False)
    pool = pb.PoolInfo(num_blocks=100, block_size=16, max_sequences=8)
    assert make_limits(pool, model, SOURCE.load(flags, {})).chunk_size == chunk_size


@pytest.mark.parametrize(
    ("prefix_caching", "kind", "takes_partial"),
    [
        (True, pb.LAYER_GROUP_KIND_SLIDING_WINDOW, True),
        (True, pb.LAYER_GROUP_KIND_TAIL, False),
        (False, pb.LAYER_GROUP_KIND_SLIDING_WINDOW, False),
    ],
)
def test_a_sequence_that_ends_stays_a_step_only_where_that_leaves_something(
    prefix_caching: bool, kind: pb.LayerGroupKind, takes_partial: bool
) -> None:
    model: Any = SimpleNamespace(max_len=4096, refuses_retention=False)
    groups = [pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_FULL, layer_idx=[0]), pb.LayerGroup(kind=kind, layer_idx=[1])]
    spec = pb.KvSpec(groups=groups)
    pool = pb.PoolInfo(num_blocks=100, block_size=16, max_sequences=8, prefix_caching=prefix_caching, spec=spec)
    assert make_limits(pool, model, SOURCE.load([], {})).takes_partial is takes_partial
