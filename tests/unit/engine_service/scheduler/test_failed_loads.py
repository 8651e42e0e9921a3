"""A transfer that fails while the answer to the next plan is on its way: what that swaps in may wait for it too."""

import pytest

from kvkeeper.engine_service.scheduler.headroom import Preemption
from tests.support.worlds.scheduler_world import make_request, tiered


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(6, 2), (6, 4), (7, 2)])
def test_a_sequence_that_shares_a_block_that_could_not_be_loaded_is_computed_again(
    num_blocks: int, block_size: int, failing: int
) -> None:
    world = tiered(num_blocks, block_size, 60, overlap=True, preemption=Preemption.SWAP, max_running=4)
    loads: list[int] = []

    def fails(order_id: int, kind: int) -> bool:
        if kind == 2:
            loads.append(order_id)
        return kind == 2 and len(loads) == failing

    world.fails = fails
    for first in range(2):
        world.submit(make_request([first, 1, 2, 0][: block_size + 1], 7, n=2))
    world.run(400)
    world.check_outputs()
    assert loads
