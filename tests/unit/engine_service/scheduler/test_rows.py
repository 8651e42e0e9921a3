"""Rows: however many sequences come back through the host tier at once, no more of them than there are rows start."""

from kvkeeper.engine_service.scheduler.headroom import Preemption
from tests.support.worlds.scheduler_world import make_request, tiered


def test_continuations_that_come_back_together_take_one_row_each() -> None:
    """Two of a request may be loading at once, which promises none of the others a row."""
    num_most_loading = 0
    for num_blocks in (8, 9, 10, 11, 12):
        world = tiered(num_blocks, 2, 60, max_running=2, preemption=Preemption.SWAP)
        for place in range(4):
            world.submit(make_request([place % 3, 1, 2], 8, n=3))
        while world.busy:
            world.step()
            loading = list(world.scheduler.state.loading.values())
            num_most_loading = max(num_most_loading, len(loading))
            assert all(count >= 0 for count in world.scheduler.planner.promised_rows().values())
        world.run()
        world.check_outputs()
    assert num_most_loading > 1
