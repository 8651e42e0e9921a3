"""What a front is given of the bounds of its engine's address."""

import pytest

from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.serving.fronts import front_config

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_fronts", "whole", "each"),
    [(1, 32 * MIB, 32 * MIB), (3, 32 * MIB, 32 * MIB // 3), (64, 32 * MIB, 4 * MIB), (2, 4 * MIB, 4 * MIB)],
)
def test_fronts_share_the_memory_of_messages_and_each_has_room_for_one(num_fronts: int, whole: int, each: int) -> None:
    config = EngineConfig(fronts=num_fronts, receive_memory=whole)
    assert front_config(config, "127.0.0.1:1", 4 << 20, has_gateway=False).receive_memory == each
